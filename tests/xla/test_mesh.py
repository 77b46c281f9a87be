"""The devices of a process and the grid over them. Each environment needs a process of its own."""

import os
import subprocess
import sys

import pytest

from trainer.errors import UserError
from trainer.layout.mesh import Mesh
from trainer.xla.chips import FLAGS
from trainer.xla.mesh import check_slices
from trainer.xla.runtime import init_runtime


def run(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """A fresh Python with these variables set, or unset where None."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    changed = {"PJRT_DEVICE": None, "CPU_NUM_DEVICES": None, **environment}
    both = {**inherited, **changed}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in both.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_dcn_factors_must_be_the_devices_slices():
    check_slices(Mesh(data=1, fsdp=-1, dcn={"data": 2}), 2)
    with pytest.raises(UserError, match=r"dcn=\{'data': 2\}"):
        check_slices(Mesh(data=1, fsdp=-1), 2)
    with pytest.raises(UserError, match="no dcn="):
        check_slices(Mesh(data=1, fsdp=-1, dcn={"data": 2}), 1)


GRID = """
import warnings
from trainer.xla.mesh import build_mesh
from trainer.xla.runtime import init_runtime
from trainer.layout.mesh import Mesh
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
from trainer.xla.runtime import init_runtime
init_runtime()
init_runtime()
print(os.environ["LIBTPU_INIT_ARGS"])
"""


def test_on_a_tpu_host_the_chips_flags_are_set_and_the_users_stay():
    own = "--xla_tpu_scoped_vmem_limit_kib=65536"
    flags = run(ON_A_TPU_HOST, PJRT_DEVICE="CPU", LIBTPU_INIT_ARGS=own).stdout.split()
    ours = {name: value for name, value in FLAGS["v5p"].items() if name != "xla_tpu_scoped_vmem_limit_kib"}
    assert flags == [own, *(f"--{name}={value}" for name, value in ours.items())]
    assert "--xla_tpu_enable_async_all_to_all=true" in flags


@pytest.mark.parametrize("count", ["many", "0", "-1", "128", ""])
def test_a_number_of_virtual_devices_that_cannot_be_is_refused(monkeypatch, count):
    monkeypatch.setenv("CPU_NUM_DEVICES", count)
    with pytest.raises(UserError, match="whole number from 1 to 127"):
        init_runtime()


def test_devices_that_are_not_there_are_one_message_and_exit_code_2():
    code = "import sys\nfrom trainer.errors import exit_code\nfrom trainer.xla.mesh import init_runtime\n"
    result = run(code + "sys.exit(exit_code(init_runtime))", PJRT_DEVICE="TPU", TPU_SKIP_MDS_QUERY="1")
    assert result.returncode == 2
    assert "error: PJRT_DEVICE=TPU" in result.stderr  # after a line of libtpu's own, where that is installed
    assert "PJRT_DEVICE=CPU for virtual devices" in result.stderr
    assert "Traceback" not in result.stderr
