"""From the names of engines to their addresses."""

from __future__ import annotations

import pytest

from pagewire_frontend.engine_client.endpoints import Endpoints, Target


class Names:
    """A resolver whose answers change."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = addresses

    async def __call__(self, host: str) -> list[str]:
        if host not in self.addresses:
            raise OSError(f"no such name: {host}")
        return self.addresses[host]


async def test_a_name_with_several_addresses_is_an_engine_at_each_certified_by_its_name() -> None:
    names = Names(engines=["10.0.0.2", "10.0.0.1"])
    endpoints = Endpoints(["engines:50061"], names)
    assert endpoints.change
    assert await endpoints.targets() == {
        "10.0.0.1:50061": Target("10.0.0.1:50061", "engines"),
        "10.0.0.2:50061": Target("10.0.0.2:50061", "engines"),
    }
    names.addresses["engines"] = ["10.0.0.2", "10.0.0.3"]
    assert list(await endpoints.targets()) == ["10.0.0.2:50061", "10.0.0.3:50061"]


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["10.0.0.1", "fd00::1"]])
async def test_a_name_of_one_host_is_called_by_its_name(addresses: list[str]) -> None:
    endpoints = Endpoints(["engine:50061"], Names(engine=addresses))
    assert await endpoints.targets() == {"engine:50061": Target("engine:50061")}


async def test_hosts_with_addresses_of_both_families_are_there_once() -> None:
    both = ["fd00::1", "10.0.0.1", "fd00::2", "10.0.0.2"]
    endpoints = Endpoints(["engines:50061"], Names(engines=both))
    assert list(await endpoints.targets()) == ["10.0.0.1:50061", "10.0.0.2:50061"]
    six = Endpoints(["engines:50061"], Names(engines=["fd00::1", "fd00::2"]))
    assert list(await six.targets()) == ["[fd00::1]:50061", "[fd00::2]:50061"]


async def test_a_name_that_can_t_be_resolved_stands_for_what_it_stood_for() -> None:
    names = Names(engines=["10.0.0.1", "10.0.0.2"])
    endpoints = Endpoints(["engines:50061"], names)
    before = await endpoints.targets()
    del names.addresses["engines"]
    assert await endpoints.targets() == before
    names.addresses["engines"] = []
    assert await endpoints.targets() == before
    # Never known: gRPC may find it later.
    assert list(await Endpoints(["engines:50061"], Names()).targets()) == ["engines:50061"]


async def test_addresses_are_not_looked_up() -> None:
    named = ["127.0.0.1:1", "[::1]:2", "localhost:3"]
    endpoints = Endpoints(named, Names())
    assert not endpoints.change
    assert list(await endpoints.targets()) == named


async def test_lists_and_names_mix_and_nothing_is_there_twice() -> None:
    endpoints = Endpoints(["10.0.0.1:5", "engines:5"], Names(engines=["10.0.0.1", "10.0.0.2"]))
    assert list(await endpoints.targets()) == ["10.0.0.1:5", "10.0.0.2:5"]
