"""The devices of a process and the grid over them. Each environment needs a process of its own."""

import itertools
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from shardwright.errors import UserError
from shardwright.layout.mesh import Mesh
from shardwright.xla.chips import FLAGS, NEWER_FLAGS
from shardwright.xla.device_mesh import build_mesh, check_mesh
from shardwright.xla.runtime import init_runtime
from tests.support import fork_server
from tests.xla.test_libtpu_library import as_pip_leaves_it


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own with these variables."""
    ours = ("PJRT_DEVICE", "CPU_NUM_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", *ours))}
    return fork_server.run("-c", code, env={**inherited, **environment})


Attributes = list[dict[str, Any]]


def chips(*sides: int, first: int = 0, corner: tuple[int, int, int] = (0, 0, 0), **more: int) -> Attributes:
    """What torch_xla reports of a box of chips, x fastest; ``more`` is reported of each."""
    at = [tuple(c + k for c, k in zip(corner, xyz[::-1], strict=True)) for xyz in itertools.product(*map(range, sides))]
    return [{"name": f"TPU:{first + i}", "coords": [*c], "core_on_chip": 0, **more} for i, c in enumerate(at)]


@pytest.fixture
def tpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the runtime report TPUs with these attributes, in place of this process's 8 virtual devices."""

    def report(attributes: Attributes, kind: str = "TPU v5 lite") -> None:
        monkeypatch.setattr(xr, "device_type", lambda: "TPU")
        monkeypatch.setattr(xr, "global_runtime_device_attributes", lambda: attributes)
        monkeypatch.setattr(xm, "xla_device_kind", lambda: kind)

    return report


RING = [0, 1, 3, 2]  # around a square of chips that are numbered row by row


@pytest.mark.parametrize("index", [{}, {"slice_index": 0}, {"slice_index": 3}])
def test_chips_of_one_slice_are_laid_out_alike_whether_or_not_they_report_its_index(tpus, index):
    tpus(chips(1, 4, 2, **index))
    mesh = build_mesh(Mesh(fsdp=-1))
    assert dict(mesh.shape()) == {"fsdp": 8}
    # there along one side and back along the other: neighbours in the mesh are joined by a link
    assert mesh.device_ids.tolist() == [0, 1, 2, 3, 7, 6, 5, 4]


def test_slices_are_the_outer_part_of_the_mesh_and_each_is_laid_out_by_its_own_links(tpus):
    both = [*chips(1, 2, 2, first=4, slice_index=1), *chips(1, 2, 2, slice_index=0)]  # in no order
    tpus(both)
    mesh = build_mesh(Mesh(data=1, fsdp=-1, dcn={"data": 2}))
    assert mesh.device_ids.reshape(2, 4).tolist() == [RING, [4 + i for i in RING]]
    assert build_mesh(Mesh(data=2, fsdp=-1)).device_ids.tolist() == mesh.device_ids.tolist()
    mesh = build_mesh(Mesh(data=2, fsdp=-1, dcn={"fsdp": 2}))
    assert [sorted(row) for row in mesh.device_ids.reshape(2, 2, 2)[:, 0].tolist()] == [[0, 1], [2, 3]]


def test_a_part_of_a_slice_that_begins_elsewhere_than_at_its_corner_is_laid_out_too(tpus):
    tpus(chips(1, 4, 2, corner=(2, 4, 0)))
    assert build_mesh(Mesh(fsdp=4, expert=2)).device_ids.tolist() == [0, 1, 2, 3, 7, 6, 5, 4]


DATA2 = Mesh(data=1, fsdp=-1, dcn={"data": 2})
HOLE = chips(1, 3, 3)
CANT_BE = {
    "slices that the recipe does not name": (
        [*chips(1, 2, 2, slice_index=0), *chips(1, 2, 2, first=4, slice_index=1)],
        Mesh(data=1, fsdp=-1),
        r"form 2 slices[\s\S]*dcn=\{'data': 2\}",
    ),
    "slices of a recipe without copies": (
        [*chips(1, 2, 2, slice_index=0), *chips(1, 2, 2, first=4, slice_index=1)],
        Mesh(fsdp=-1),
        r"--mesh data=2,fsdp=4, a copy of the model on each slice; or dcn=\{'fsdp': 2\}",
    ),
    "slices that are not there": (chips(1, 4, 2), DATA2, "form 1 slices[\\s\\S]*no dcn="),
    "one slice with an index for two": (chips(1, 4, 2, slice_index=0), DATA2, "form 1 slices[\\s\\S]*no dcn="),
    "slices of two sizes": (
        [*chips(1, 1, 2, slice_index=0), *chips(1, 3, 2, first=2, slice_index=1)],
        DATA2,
        "of slice 0; [\\s\\S]* of slice 1",
    ),
    "an index for some": ([*chips(1, 1, 2), *chips(1, 3, 2, first=2, slice_index=1)], DATA2, "of slice 1"),
    "chips that fill no box": (HOLE[:4] + HOLE[5:], Mesh(fsdp=-1), r"chips at 0,0,0; 1,0,0; 2,0,0; 0,1,0; 2,1,0"),
    "no coordinates": ([{"name": f"TPU:{i}"} for i in range(8)], Mesh(fsdp=-1), "coords|must fill a box"),
    "two devices a chip": (
        [{**chip, "core_on_chip": core, "name": f"TPU:{2 * i + core}"} for i, chip in enumerate(chips(1, 2, 2))
         for core in (0, 1)],
        Mesh(fsdp=-1),
        "0,0,0; 0,0,0, core 1",
    ),
    "an axis that no side can be divided by": (chips(1, 1, 20), Mesh(data=10, fsdp=2), r"Mesh\(data=10, fsdp=2\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANT_BE)
def test_devices_that_the_mesh_cant_be_laid_out_on_are_one_message_before_anything_is_read(tpus, case):
    attributes, mesh, pattern = CANT_BE[case]
    tpus(attributes, kind="TPU v4")
    with pytest.raises(UserError, match=pattern) as error:
        check_mesh(mesh)
    assert len(str(error.value)) < 1200


def test_virtual_devices_take_any_mesh_of_their_number_and_are_not_asked():
    check_mesh(DATA2)


GRID = """
import warnings
from shardwright.xla.device_mesh import build_mesh
from shardwright.xla.runtime import init_runtime
from shardwright.layout.mesh import Mesh
print(init_runtime())
warnings.simplefilter("error")
mesh = build_mesh(Mesh(data=1, fsdp=-1, expert=2, dcn={"data": 2}))
import torch_xla.runtime as xr
print(dict(mesh.shape()), mesh.device_ids.tolist(), xr.is_spmd())
"""


def test_without_an_accelerator_there_are_eight_virtual_devices_and_the_user_is_told():
    result = run(GRID)
    told, grid = result.stdout.splitlines()
    assert told == "8 virtual CPU devices (no accelerator found)"
    assert grid == "{'data': 2, 'fsdp': 2, 'expert': 2} [0, 1, 2, 3, 4, 5, 6, 7] True"
    assert result.stderr == ""


def test_the_number_of_virtual_devices_is_the_users():
    assert run(GRID, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4").stdout.splitlines() == [
        "4 virtual CPU devices (no accelerator found)",
        "{'data': 2, 'fsdp': 1, 'expert': 2} [0, 1, 2, 3] True",
    ]


ON_A_TPU_HOST = """
import os
from jax._src import hardware_utils
hardware_utils.num_available_tpu_chips_and_device_id = lambda: (4, hardware_utils.TpuVersion.v5p)
from shardwright.xla.runtime import init_runtime
init_runtime()
init_runtime()
print(os.environ["LIBTPU_INIT_ARGS"])
"""


def test_on_a_tpu_host_the_chips_flags_for_its_libtpu_are_set_and_the_users_stay(tmp_path):
    own, folder = "--xla_tpu_scoped_vmem_limit_kib=65536", as_pip_leaves_it(tmp_path, "0.0.52")
    given = {"LIBTPU_INIT_ARGS": own, "TPU_LIBRARY_PATH": str(folder)}
    flags = run(ON_A_TPU_HOST, PJRT_DEVICE="CPU", **given).stdout.split()
    ours = FLAGS["v5p"] | NEWER_FLAGS["v5p"]
    del ours["xla_tpu_scoped_vmem_limit_kib"]
    assert flags == [own, *(f"--{name}={value}" for name, value in ours.items())]
    assert "--xla_tpu_enable_async_all_to_all=true" in flags


@pytest.mark.parametrize("count", ["many", "0", "-1", "128", ""])
def test_a_number_of_virtual_devices_that_cannot_be_is_refused(monkeypatch, count):
    monkeypatch.setenv("CPU_NUM_DEVICES", count)
    with pytest.raises(UserError, match="whole number from 1 to 127"):
        init_runtime()


def test_devices_that_are_not_there_are_one_message_and_exit_code_2():
    code = "import sys\nfrom shardwright.hosts.output_streams import exit_code\n"
    code += "from shardwright.xla.device_mesh import init_runtime\n"
    result = run(code + "sys.exit(exit_code(init_runtime))", PJRT_DEVICE="TPU", TPU_SKIP_MDS_QUERY="1")
    assert result.returncode == 2
    assert "error: PJRT_DEVICE=TPU" in result.stderr  # after a line of libtpu's own, where that is installed
    assert "PJRT_DEVICE=CPU for virtual devices" in result.stderr
    assert "Traceback" not in result.stderr
