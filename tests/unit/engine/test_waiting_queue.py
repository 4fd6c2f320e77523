"""Who of the waiting is next: priority, then what the tenant has been served, then arrival."""

from __future__ import annotations

import time

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagewire_engine.request import Request
from pagewire_engine.waiting_queue import WaitingQueue
from tests.unit.engine.harness import submission

MOST = 60
"""What a start costs at most in these tests."""


def request(arrival: int, tenant: str = "", priority: int = 0) -> Request:
    return Request(
        submission(str(arrival), range(4), tenant=tenant, priority=priority),
        seed=0,
        arrival_number=arrival,
        first_sequence_id=arrival,
        max_model_len=64,
        eos_token_ids=frozenset(),
        now=float(arrival),
    )


def start(queue: WaitingQueue, cost: int) -> Request:
    head = queue.head()
    assert head is not None
    queue.remove(head)
    head.account.service += cost
    return head


def starts(queue: WaitingQueue, count: int, cost: int = 10) -> list[int]:
    """Arrival numbers in the order of their starts."""
    return [start(queue, cost).order[1] for _ in range(count)]


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for each in requests:
        queue.add(each)
    return queue


def test_one_tenant_is_served_in_order_of_priority_then_arrival() -> None:
    queue = queue_of(request(0, priority=1), request(1), request(2, priority=1), request(3))
    assert [each.order[1] for each in queue] == [1, 3, 0, 2]
    assert starts(queue, 4) == [1, 3, 0, 2]
    assert not queue
    assert queue.head() is None


def test_two_tenants_take_turns_though_one_came_with_all_its_requests_first() -> None:
    queue = queue_of(
        *(request(n, "big") for n in range(6)), *(request(n, "b") for n in range(6, 9))
    )
    assert starts(queue, 9) == [0, 6, 1, 7, 2, 8, 3, 4, 5]


def test_turns_are_by_cost_and_not_by_number() -> None:
    queue = queue_of(
        *(request(n, "long") for n in range(4)), *(request(n, "b") for n in range(4, 9))
    )
    order = [start(queue, 40 if queue.head().tenant == "long" else 10).tenant for _ in range(7)]  # type: ignore[union-attr]
    assert order == ["long", "b", "b", "b", "b", "long", "b"]


def test_output_counts_while_it_is_produced() -> None:
    queue = queue_of(request(0, "talks"), request(1, "talks"), request(2, "b"), request(3, "b"))
    talker = start(queue, 10)
    talker.account.service += 100
    assert starts(queue, 3) == [2, 3, 1]


def test_priority_goes_before_fairness() -> None:
    queue = queue_of(request(0, "served"), request(1, "b", priority=1))
    start(queue, 1000)
    queue.add(request(2, "served"))
    assert starts(queue, 2) == [2, 1]


def test_idle_time_gives_no_credit() -> None:
    queue = queue_of(*(request(n, "busy") for n in range(20)))
    starts(queue, 10, cost=100)
    for n in range(20, 30):
        queue.add(request(n, "idle so far"))
    first = starts(queue, 6, cost=100)
    assert sum(n >= 20 for n in first) == 3


def test_idle_time_gives_no_credit_where_nobody_waited_in_between() -> None:
    queue = queue_of(request(0, "busy"))
    start(queue, 10).account.service += 5000
    for n in range(1, 11):
        queue.add(request(n, "idle so far" if n % 2 else "busy"))
    assert starts(queue, 6) == [1, 2, 3, 4, 5, 6]


def test_a_burst_of_a_tenant_that_was_idle_goes_first_as_far_as_it_may() -> None:
    queue = WaitingQueue(burst=200)
    for n in range(20):
        queue.add(request(n, "busy"))
    starts(queue, 10, cost=100)
    for n in range(20, 30):
        queue.add(request(n, "idle so far"))
    assert starts(queue, 6, cost=100) == [20, 21, 10, 22, 11, 23]


def test_a_debt_outlives_an_empty_line() -> None:
    queue = queue_of(request(0, "spender"), *(request(n, "b") for n in range(1, 6)))
    start(queue, 35)
    queue.add(request(6, "spender"))
    assert starts(queue, 5) == [1, 2, 3, 4, 6]


def test_a_preempted_request_returns_to_the_head_of_its_tenants_line() -> None:
    queue = queue_of(*(request(n, "a") for n in range(3)))
    first, second = start(queue, 10), start(queue, 10)
    for preempted in (second, first):
        queue.add(preempted)
    assert starts(queue, 3, cost=0) == [0, 1, 2]


def test_removed_requests_never_start_and_removing_twice_is_no_error() -> None:
    requests = [request(n, "ab"[n % 2]) for n in range(6)]
    queue = queue_of(*requests)
    for each in (requests[0], requests[3], requests[3]):
        queue.remove(each)
    queue.remove(request(9, "stranger"))
    assert len(queue) == 4
    assert starts(queue, 4) == [1, 2, 4, 5]


def test_the_oldest_is_one_that_never_started() -> None:
    queue = queue_of(request(0), request(1, priority=-1))
    started = start(queue, 1)
    started.clock.first_scheduled = 5.0
    queue.add(started)
    assert queue.oldest() is not None
    assert queue.oldest().order[1] == 0  # type: ignore[union-attr]
    start(queue, 1)
    start(queue, 1)
    assert queue.oldest() is None


def test_tenants_that_have_gone_are_forgotten() -> None:
    queue = WaitingQueue()
    for n in range(20_000):
        queue.add(request(n, f"tenant {n}"))
        start(queue, 10)
    accounts = queue._accounts
    assert len(accounts._idle) <= 2048
    assert not accounts._waiting
    assert not queue._lines
    assert len(queue._heaps[0]) <= 32
    assert not queue._num_lines


def test_a_long_line_costs_no_more_than_a_short_one() -> None:
    def seconds(length: int) -> float:
        requests = [request(n, "big") for n in range(length)]
        queue = queue_of(*requests)
        best = float("inf")
        for _ in range(20):
            begun = time.perf_counter()
            for _ in range(50):
                head = queue.head()
                assert head is not None
                queue.remove(head)
                head.account.service += 1
                queue.add(head)
            best = min(best, time.perf_counter() - begun)
        return best

    # Linear would be 500 times.
    assert seconds(10_000) < 50 * seconds(20)


class WaitingQueueMachine(RuleBasedStateMachine):
    """Adds, starts, charges, preempts and removes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: dict[int, Request] = {}
        self.running: list[Request] = []
        self.ended: set[int] = set()
        self.arrivals = 0

    @rule(tenant=st.sampled_from("abcd"), priority=st.integers(0, 2), count=st.integers(1, 5))
    def add(self, tenant: str, priority: int, count: int) -> None:
        for _ in range(count):
            each = request(self.arrivals, tenant, priority)
            self.queue.add(each)
            self.waiting[self.arrivals] = each
            self.arrivals += 1

    @precondition(lambda self: self.waiting)
    @rule(cost=st.integers(1, MOST))
    def start(self, cost: int) -> None:
        head = self.queue.head()
        assert head is not None
        rivals = [each for each in self.waiting.values() if each.order[0] == head.order[0]]
        assert all(each.order[0] >= head.order[0] for each in self.waiting.values())
        # Nobody of this priority has been served less, so that however much waits before it, a
        # tenant is at most one start behind any other.
        assert head.account.service == min(each.account.service for each in rivals)
        assert head.order[1] == min(each.order[1] for each in rivals if each.tenant == head.tenant)
        self.queue.remove(head)
        del self.waiting[head.order[1]]
        assert head.order[1] not in self.ended
        head.account.service += cost
        for each in rivals:
            assert head.account.service <= each.account.service + MOST
        self.running.append(head)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ends=st.booleans(), cost=st.integers(0, MOST))
    def serve(self, data: st.DataObject, ends: bool, cost: int) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        self.running[index].account.service += cost
        if ends:
            self.ended.add(self.running.pop(index).order[1])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        each = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        each.num_preemptions += 1
        self.queue.add(each)
        self.waiting[each.order[1]] = each

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        arrival = data.draw(st.sampled_from(sorted(self.waiting)))
        self.queue.remove(self.waiting.pop(arrival))
        self.ended.add(arrival)

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert {each.order[1] for each in self.queue} == set(self.waiting)
        for tenant in "abcd":
            count = sum(each.tenant == tenant for each in self.waiting.values())
            assert self.queue.num_waiting(tenant) == count
        assert self.queue.num_tenants == len({each.tenant for each in self.waiting.values()})

    def teardown(self) -> None:
        """Everyone who is left comes out, once."""
        left = set(self.waiting)
        while self.queue:
            left.remove(start(self.queue, 1).order[1])
        assert not left


TestWaitingQueueMachine = WaitingQueueMachine.TestCase
TestWaitingQueueMachine.settings = hypothesis_settings(max_examples=50)
