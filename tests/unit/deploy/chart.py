"""The Helm chart as a cluster would get it, and what its objects must look like."""

from __future__ import annotations

import functools
from typing import Any, cast

import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

from tests.unit.deploy.tools import CHART, helm

VALUES = tuple(sorted(path.name.removesuffix("-values.yaml") for path in CHART.glob("ci/*")))
# The lowest that the chart allows, and the newest that is known here.
KUBERNETES_VERSIONS = ("1.27", "1.37")
RELEASE = "r"
Manifest = dict[str, Any]


@functools.cache
def rendered(values: str, *settings: str) -> tuple[Manifest, ...]:
    """What `helm template` makes of a file of values in ci/, and of `--set` on top."""
    file = CHART / "ci" / f"{values}-values.yaml"
    options = [option for setting in settings for option in ("--set", setting)]
    result = helm("template", RELEASE, str(CHART), "-f", str(file), *options)
    assert result.returncode == 0, result.stderr
    return tuple(filter(None, yaml.safe_load_all(result.stdout)))


def find(manifests: tuple[Manifest, ...], kind: str, ending: str = "") -> Manifest:
    """The one object of this kind whose name ends so."""
    (found,) = [
        one for one in manifests if one["kind"] == kind and one["metadata"]["name"].endswith(ending)
    ]
    return found


def workloads(manifests: tuple[Manifest, ...]) -> dict[str, Manifest]:
    """The objects that make pods, by component."""
    return {
        one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: one
        for one in manifests
        if one["kind"] in ("StatefulSet", "Deployment")
    }


def pod_of(workload: Manifest) -> Manifest:
    return cast(Manifest, workload["spec"]["template"]["spec"])


def container_of(workload: Manifest) -> Manifest:
    (container,) = pod_of(workload)["containers"]
    return cast(Manifest, container)


def check(manifest: Manifest, version: str) -> None:
    """Holds an object to the schema of its kind.

    Raises:
        ValueError: it has a field that its kind has not, or one of another type.
    """
    if manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        model = getattr(prometheus_operator, manifest["kind"])
        known = model.model_validate(manifest).model_dump(
            mode="json", by_alias=True, exclude_unset=True
        )
        # The models leave out what they don't know.
        if known != manifest:
            raise ValueError(f"{manifest['kind']}: {_difference(manifest, known)}")
        return
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise ValueError(f"{manifest['kind']}: {error}") from None


def _difference(wanted: Any, known: Any, path: str = "") -> str:
    if isinstance(wanted, dict) and isinstance(known, dict):
        for key in wanted:
            if wanted[key] != known.get(key):
                return _difference(wanted[key], known.get(key), f"{path}.{key}")
    if isinstance(wanted, list) and isinstance(known, list) and len(wanted) == len(known):
        for number, (one, other) in enumerate(zip(wanted, known, strict=True)):
            if one != other:
                return _difference(one, other, f"{path}[{number}]")
    return f"{path}: {wanted!r} is read as {known!r}"
