"""Builds the images of deploy/docker/Dockerfile with buildah and runs their commands as a cluster
would: as the image's user, without capabilities, on a root that can't be written to.

No registry of images is needed: what the Dockerfile calls PYTHON is made by debootstrap, of the
same release of Debian and with the same minor version of Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.deploy.tools import DEPLOY, ROOT, tool

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
_DEBIAN = "bookworm"
_PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# In a mount namespace of its own: the root read-only, but for what the chart mounts as well; then
# the user of the image, who may gain nothing.
_ENTER = """
set -e
root=$1 user=$2; shift 2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o uid="$user",gid="$user" tmpfs "$root/cache"
for pair in $MOUNTS; do mount --bind -o ro "${pair%%:*}" "$root/${pair#*:}"; done
unset MOUNTS
mount -o remount,ro,bind "$root"
exec chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups --bounding-set=-all \
  --no-new-privs -- "$@"
"""


@dataclass(frozen=True)
class Image:
    """A built image, laid out in a folder.

    Attributes:
        root: its files.
        config: what it says of itself: User, Env, Entrypoint, Healthcheck, ...
        size: bytes of its files.
    """

    root: Path
    config: dict[str, Any]
    size: int

    @property
    def entrypoint(self) -> list[str]:
        return list(self.config["Entrypoint"])

    @property
    def health_check(self) -> list[str]:
        kind, *command = self.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return list(command)

    def start(
        self, command: Sequence[str], mounts: Mapping[Path, str] | None = None
    ) -> subprocess.Popen[str]:
        """A process in it, on this machine's network. `mounts`: folders and where they are seen."""
        user = self.config["User"].partition(":")[0]
        assert user.isdecimal()
        assert user != "0"
        pairs = " ".join(f"{source}:{target}" for source, target in (mounts or {}).items())
        return subprocess.Popen(
            [tool("unshare", "apt-get install util-linux"), "--mount", "--propagation=private",
             "bash", "-c", _ENTER, "enter", str(self.root), user, *command],
            env=dict(entry.split("=", 1) for entry in self.config["Env"]) | {"MOUNTS": pairs},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip


class ImageStore:
    """Images and what they are made of, in a folder that `remove` takes away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Some GB of small files that are soon thrown away: in memory they cost no disk its time.
        _run("mount", "-t", "tmpfs", "-o", "size=10g", "tmpfs", str(folder))
        self._store = [f"--root={folder}/storage", f"--runroot={folder}/run"]
        self._pip_mounts = self._own_pip_settings()

    def make_base(self, name: str) -> None:
        """An image of Debian with Python, under the name that the Dockerfile begins with."""
        root = self._folder / "debian"
        program = tool("debootstrap", "apt-get install debootstrap")
        _run(program, "--variant=minbase", f"--include={_PACKAGES}", _DEBIAN, str(root))
        container = self._buildah("from", "scratch")
        self._buildah("add", "--quiet", container, str(root), "/")
        self._buildah("config", "--env", f"PATH={_PATH}", container)
        self._buildah("commit", "--quiet", "--rm", container, f"docker.io/library/{name}")
        shutil.rmtree(root)

    def build_all(self, targets: Mapping[str, Mapping[str, str]]) -> dict[str, Image]:
        """Several of the Dockerfile's targets, each with its arguments; two at a time: pip and
        compilers use one core each."""
        self._build_stage("wheel", {})  # which all begin with
        with ThreadPoolExecutor(2) as pool:
            return dict(zip(targets, pool.map(self._build, targets, targets.values()), strict=True))

    def _build(self, target: str, arguments: Mapping[str, str]) -> Image:
        self._build_stage(target, arguments)
        told = json.loads(self._buildah("inspect", "--type=image", f"localhost/{target}"))
        container = self._buildah("from", "--pull-never", f"localhost/{target}")
        root = Path(self._buildah("mount", container))
        return Image(root, told["Docker"]["config"], _bytes(root))

    def _build_stage(self, target: str, arguments: Mapping[str, str]) -> None:
        options = ["--pull-never", "--layers", "--format=docker", "--isolation=chroot", "--quiet"]
        for name, value in arguments.items():
            options += ["--build-arg", f"{name}={value}"]
        for path, place in self._pip_mounts.items():
            options += ["--volume", f"{path}:{place}:ro"]
        options += ["--target", target, "--tag", target, "--file", str(DOCKERFILE)]
        self._buildah("build", *options, str(ROOT))

    def remove(self) -> None:
        """Takes all of it away."""
        self._buildah("umount", "--all")
        # Overlays that are still mounted below it go with it.
        _run("umount", "--recursive", "--lazy", str(self._folder))

    def _buildah(self, command: str, *arguments: str) -> str:
        program = tool("buildah", "apt-get install buildah")
        return _run(program, *self._store, command, *arguments).strip()

    def _own_pip_settings(self) -> dict[Path, str]:
        """How pip finds packages on this machine, for the pip in an image: a file of its settings,
        and the paths that they name."""
        listed = _run("pip", "config", "list")
        settings = [line.partition("=") for line in listed.splitlines()]
        values = {key.rpartition(".")[2]: value.strip("'\"") for key, _, value in settings}
        file = self._folder / "pip.conf"
        lines = [f"{key} = {value}" for key, value in values.items()]
        file.write_text("\n".join(["[global]", *lines]))
        words = [word for value in values.values() for word in value.split()]
        # An index that is a folder points at files beside it.
        indexes = [Path(word[7:]).parent for word in words if word.startswith("file://")]
        paths = [*indexes, *(Path(word) for word in words if word.startswith("/"))]
        return {file: "/etc/pip.conf"} | {path: str(path) for path in paths if path.exists()}


def _bytes(folder: Path) -> int:
    return int(_run("du", "--summarize", "--bytes", str(folder)).split()[0])


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout
