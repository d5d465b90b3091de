"""The essential tests of the shim and of pods again, below containerd 1.7; `./dev torture shim` runs all, and 2 too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cri import Cri
from tests.e2e.test_pods import test_a_pod_with_a_network_of_its_own as pod_goes_on
from tests.e2e.test_shim import test_containerd_is_killed as containerd_is_killed
from tests.e2e.test_shim import test_stopped_in_one_container_and_going_on_in_another as container_goes_on
from tests.e2e.test_shim import test_who_did_not_opt_in as who_did_not_opt_in
from tests.e2e.test_shim_alike import options_for_runc
from tests.engine import IMAGE, Containerd, containerd
from tests.lab import lab

VERSION = "1.7"
pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.requires("criu", f"containerd-{VERSION}")]


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with lab(tmp_path_factory.mktemp("newer")) as made, containerd(made, version=VERSION) as engine:
        yield engine


def test_containers(engine: Containerd) -> None:
    container_goes_on(engine)
    containerd_is_killed(engine)
    who_did_not_opt_in(engine)


@pytest.mark.requires("cc", "cni")
def test_pods(tmp_path: Path) -> None:
    with lab(tmp_path) as made, containerd(made, version=VERSION, pods=True) as engine:
        pod_goes_on(engine, Cri(engine.home / "socket", IMAGE))
        options_for_runc(engine)
