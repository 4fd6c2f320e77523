"""The Helm chart renders, for several files of values, to objects that Kubernetes knows, that agree
with one another and with the programs they start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from pagewire.config import EngineConfig
from pagewire.settings import parse_settings
from pagewire_frontend import health_check
from pagewire_frontend.config import FrontendConfig
from pagewire_ui.config import UiConfig
from tests.unit.deploy.chart import (
    KUBERNETES_VERSIONS,
    VALUES,
    Manifest,
    check,
    container_of,
    find,
    pod_of,
    rendered,
    workloads,
)
from tests.unit.deploy.tools import CHART, DASHBOARD, RULES, helm

PROGRAMS: dict[str, type[BaseModel]] = {
    "engine": EngineConfig,
    "frontend": FrontendConfig,
    "ui": UiConfig,
}
COMPONENT = "app.kubernetes.io/component"

every_values = pytest.mark.parametrize("values", VALUES)


def settings_of(values: str, component: str, tmp_path: Path) -> Any:
    """What the program reads from the settings file that its pod mounts."""
    manifests = rendered(values)
    container = container_of(workloads(manifests)[component])
    (flag,) = container["args"]
    folder, _, name = flag.removeprefix("--config=").rpartition("/")
    assert folder in [mount["mountPath"] for mount in container["volumeMounts"]]
    file = tmp_path / name
    file.write_text(find(manifests, "ConfigMap", f"-{component}")["data"][name])
    return parse_settings(
        PROGRAMS[component], [f"--config={file}"], prog=component, description="", environ={}
    )


@every_values
def test_helm_finds_nothing_to_blame(values: str) -> None:
    file = CHART / "ci" / f"{values}-values.yaml"
    result = helm("lint", "--strict", str(CHART), "-f", str(file))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@every_values
def test_every_object_is_one_that_kubernetes_knows(values: str, version: str) -> None:
    manifests = rendered(values)
    assert len(manifests) > 10
    for manifest in manifests:
        check(manifest, version)


WRONG: list[tuple[str, Callable[[Manifest], None]]] = [
    ("StatefulSet", lambda one: container_of(one).update(livenessProb={})),
    ("StatefulSet", lambda one: one["spec"].update(replicas="two")),
    ("Deployment", lambda one: pod_of(one).update(terminationGracePeriod=3)),
    ("NetworkPolicy", lambda one: one["spec"]["ingress"][0].update(form=[])),
    ("HorizontalPodAutoscaler", lambda one: one["spec"]["metrics"][0].pop("type")),
    ("ServiceMonitor", lambda one: one["spec"]["endpoints"][0].update(intervall="3s")),
    ("ServiceMonitor", lambda one: one["spec"].update(endpoints="http")),
    ("PrometheusRule", lambda one: one["spec"]["groups"][0]["rules"][0].update(exp="up")),
]


@pytest.mark.parametrize(("kind", "spoil"), WRONG)
def test_a_wrong_field_is_found(kind: str, spoil: Callable[[Manifest], None]) -> None:
    good = next(one for one in rendered("gpu") if one["kind"] == kind)
    wrong = copy.deepcopy(good)
    spoil(wrong)
    check(good, KUBERNETES_VERSIONS[-1])
    with pytest.raises(ValueError, match=kind):
        check(wrong, KUBERNETES_VERSIONS[-1])


@every_values
def test_programs_read_the_settings_that_they_are_given(values: str, tmp_path: Path) -> None:
    for component in workloads(rendered(values)):
        settings_of(values, component, tmp_path)


@every_values
def test_pods_keep_to_the_restricted_standard(values: str) -> None:
    for workload in workloads(rendered(values)).values():
        pod, container = pod_of(workload), container_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["automountServiceAccountToken"] is False
        assert not any("hostPath" in volume for volume in pod["volumes"])


@every_values
def test_what_is_mounted_is_there_and_what_is_there_is_mounted(values: str) -> None:
    for workload in workloads(rendered(values)).values():
        volumes = {volume["name"] for volume in pod_of(workload)["volumes"]}
        claims = workload["spec"].get("volumeClaimTemplates", [])
        volumes |= {claim["metadata"]["name"] for claim in claims}
        mounts = container_of(workload)["volumeMounts"]
        assert {mount["name"] for mount in mounts} == volumes
        # Where programs write, with a root that can't be written to.
        assert {"/tmp", "/cache"} <= {mount["mountPath"] for mount in mounts}


@every_values
def test_selectors_find_their_pods_and_ports(values: str) -> None:
    manifests = rendered(values)
    labels = {
        component: one["spec"]["template"]["metadata"]["labels"]
        for component, one in workloads(manifests).items()
    }
    ports = {
        component: {port["name"] for port in container_of(one)["ports"]}
        for component, one in workloads(manifests).items()
    }
    for manifest in manifests:
        spec = manifest.get("spec", {})
        component = manifest["metadata"]["labels"][COMPONENT]
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is None or manifest["kind"] == "ServiceMonitor":
            continue
        wanted = selector.get("matchLabels", selector)
        assert wanted.items() <= labels[component].items(), manifest["kind"]
        others = [label for name, label in labels.items() if name != component]
        assert not any(wanted.items() <= other.items() for other in others)
        if manifest["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports[component]


def test_engines_are_reached_by_frontends_alone() -> None:
    for values in VALUES:
        policy = find(rendered(values), "NetworkPolicy", "-engine")["spec"]
        (rule,) = policy["ingress"]
        (peer,) = rule["from"]
        assert peer["podSelector"]["matchLabels"][COMPONENT] == "frontend"
        assert "namespaceSelector" not in peer
        assert {port["port"] for port in rule["ports"]} == {"control", "deltas"}
        assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_clients_that_are_named_are_the_only_ones() -> None:
    (rule,) = find(rendered("cpu"), "NetworkPolicy", "-frontend")["spec"]["ingress"]
    assert [next(iter(peer)) for peer in rule["from"]] == ["podSelector", "namespaceSelector"]
    (rule,) = find(rendered("gpu"), "NetworkPolicy", "-frontend")["spec"]["ingress"]
    assert "from" not in rule


@pytest.mark.parametrize("values", [name for name in VALUES if name != "tls"])
def test_probes_tell_alive_from_ready_and_from_starting(values: str) -> None:
    frontend = container_of(workloads(rendered(values))["frontend"])
    assert frontend["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert frontend["readinessProbe"]["httpGet"]["path"] == "/health"
    assert frontend["startupProbe"]["httpGet"]["path"] == "/health/live"
    engine = container_of(workloads(rendered(values))["engine"])
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        assert engine[probe]["grpc"] == {"port": 50061, "service": "pagewire.v1.Engine"}
    budget = engine["startupProbe"]["periodSeconds"] * engine["startupProbe"]["failureThreshold"]
    assert budget >= 1800
    patience = (
        engine["livenessProbe"]["periodSeconds"] * engine["livenessProbe"]["failureThreshold"]
    )
    assert 60 <= patience < budget


def test_with_certificates_probes_are_questions_that_the_health_check_understands() -> None:
    for component, target in (
        ("engine", "127.0.0.1:50061"),
        ("frontend", "unix:/run/pagewire/grpc.sock"),
    ):
        container = container_of(workloads(rendered("tls"))[component])
        services = []
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            program, flag, module, *arguments = container[probe]["exec"]["command"]
            assert (program, flag, module) == ("python", "-m", health_check.__name__)
            options = health_check._parser().parse_args(arguments)
            assert options.target == target
            services.append(options.service)
            assert container[probe]["timeoutSeconds"] > health_check.TIMEOUT_S
        if component == "frontend":
            assert services == ["", "pagewire.v1.Inference", ""]


def test_tls_is_spoken_on_every_wire_and_files_are_where_flags_say(tmp_path: Path) -> None:
    engine = settings_of("tls", "engine", tmp_path)
    frontend = settings_of("tls", "frontend", tmp_path)
    page = settings_of("tls", "ui", tmp_path)
    assert engine.tls_cert
    assert engine.tls_client_ca
    assert frontend.engine_ca
    assert frontend.engine_cert
    assert frontend.tls_client_ca
    assert frontend.api_key_file
    assert page.frontend_ca
    assert page.frontend_cert
    assert page.login
    for component, settings in (("engine", engine), ("frontend", frontend), ("ui", page)):
        container = container_of(workloads(rendered("tls"))[component])
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for name, value in settings:
            if name.endswith(("_ca", "_cert", "_key", "_file", "socket")) and value:
                assert str(Path(value).parent) in mounts, name


@every_values
def test_frontends_look_for_engines_under_the_name_of_their_headless_service(
    values: str, tmp_path: Path
) -> None:
    service = find(rendered(values), "Service", "-engine")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    frontend = settings_of(values, "frontend", tmp_path)
    assert frontend.engine == (f"{service['metadata']['name']}:50061",)


def test_gpus_are_asked_for_where_there_are_some() -> None:
    gpu = container_of(workloads(rendered("gpu"))["engine"])
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert gpu["image"] == "registry.example.org/ml/pagewire-engine:0.1.0"
    cpu = container_of(workloads(rendered("cpu"))["engine"])
    assert "nvidia.com/gpu" not in cpu["resources"]["limits"]
    assert cpu["image"] == "pagewire-engine-cpu:0.1.0"


def test_engines_have_shared_memory_a_cache_and_the_hubs_token() -> None:
    engine = workloads(rendered("gpu"))["engine"]
    shm = next(volume for volume in pod_of(engine)["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    (claim,) = engine["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    (token,) = container_of(engine)["env"]
    assert token["name"] == "HF_TOKEN"
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub-token", "key": "token"}


def test_adapters_lie_on_a_volume_that_outlives_the_release(tmp_path: Path) -> None:
    engine = settings_of("adapters", "engine", tmp_path)
    assert engine.lora_modules == ("pirate=/adapters/pirate", "poet=/adapters/poems/v2")
    assert (engine.lora_dir, engine.max_loras) == ("/adapters", 8)
    assert settings_of("adapters", "frontend", tmp_path).allow_runtime_lora_updating
    claim = find(rendered("adapters"), "PersistentVolumeClaim", "-adapters")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    mounts = container_of(workloads(rendered("adapters"))["engine"])["volumeMounts"]
    (mount,) = [one for one in mounts if one["name"] == "adapters"]
    assert mount["readOnly"]


@every_values
def test_what_ends_gets_the_time_it_needs(values: str, tmp_path: Path) -> None:
    frontend = settings_of(values, "frontend", tmp_path)
    pod = pod_of(workloads(rendered(values))["frontend"])
    (_, pause) = container_of(workloads(rendered(values))["frontend"])["lifecycle"]["preStop"][
        "exec"
    ]["command"]
    assert pod["terminationGracePeriodSeconds"] > frontend.grace_period_s + int(pause)
    engine = settings_of(values, "engine", tmp_path)
    pod = pod_of(workloads(rendered(values))["engine"])
    assert engine.drain_timeout_s == 60
    assert pod["terminationGracePeriodSeconds"] > engine.drain_timeout_s + 10


def test_the_autoscaler_scales_the_frontends_and_their_number_is_left_to_it() -> None:
    scaler = find(rendered("gpu"), "HorizontalPodAutoscaler")["spec"]
    frontend = workloads(rendered("gpu"))["frontend"]
    assert scaler["scaleTargetRef"]["name"] == frontend["metadata"]["name"]
    assert "replicas" not in frontend["spec"]
    assert container_of(frontend)["resources"]["requests"]["cpu"]
    assert [metric["type"] for metric in scaler["metrics"]] == ["Resource", "Pods"]
    assert workloads(rendered("cpu"))["frontend"]["spec"]["replicas"] == 1


def test_rules_and_dashboard_are_those_of_the_repository() -> None:
    rule = find(rendered("gpu"), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    board = next(
        one
        for one in rendered("gpu")
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].endswith("-dashboard")
    )
    assert board["data"]["pagewire.json"].strip() == DASHBOARD.read_text().strip()


def test_the_monitor_scrapes_frontends_as_the_job_that_rules_know() -> None:
    for values in ("gpu", "tls", "adapters"):
        manifests = rendered(values)
        monitor = find(manifests, "ServiceMonitor")["spec"]
        service = find(manifests, "Service", "-frontend")
        labels = service["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        assert labels[monitor["jobLabel"]] == "pagewire"
        (endpoint,) = monitor["endpoints"]
        assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]


@pytest.mark.parametrize(
    ("values", "setting", "message"),
    [
        ("cpu", "engine.settings.port=1", "port is decided by the chart"),
        ("cpu", "frontend.settings.engine=x", "engine is decided by the chart"),
        ("cpu", "engine.replica=2", "additional properties 'replica' not allowed"),
        ("cpu", "engine.device=tpu", "/engine/device"),
        ("cpu", "model.name=", "/model/name"),
        ("tls", "tls.engine.clientSecret=", "tls.engine.secret needs tls.engine.clientSecret"),
        ("tls", "tls.frontend.uiSecret=", "needs tls.frontend.uiSecret"),
        ("adapters", "metrics.open=false", "with API keys /metrics asks for one"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: str, setting: str, message: str) -> None:
    file = CHART / "ci" / f"{values}-values.yaml"
    result = helm("template", "r", str(CHART), "-f", str(file), "--set", setting)
    assert result.returncode != 0
    assert message in result.stderr


def test_every_value_is_one_that_the_schema_knows_and_that_a_template_reads() -> None:
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        if not isinstance(tree, dict) or not tree:
            return [path]
        return [leaf for key, child in tree.items() for leaf in leaves(child, (*path, key))]

    for path in leaves(values):
        assert f".{path[-1]}" in templates or f".{path[-2]}" in templates, path
