"""A mesh's axes against a number of devices: sizes, slices, and what can't be."""

import pytest

from shardwright.errors import UserError
from shardwright.layout.mesh import Mesh


def test_minus_one_takes_what_is_left_and_axes_keep_their_order():
    mesh = Mesh(data=2, fsdp=-1, expert=4)
    assert list(mesh.sizes(64).items()) == [("data", 2), ("fsdp", 8), ("expert", 4)]
    assert mesh.sizes(8) == {"data": 2, "fsdp": 1, "expert": 4}


def test_an_axis_has_ici_times_dcn_devices():
    mesh = Mesh(data=1, fsdp=-1, expert=4, dcn={"data": 2})
    assert mesh.sizes(64) == {"data": 2, "fsdp": 8, "expert": 4}
    assert mesh.ici_sizes(64) == {"data": 1, "fsdp": 8, "expert": 4}
    assert mesh.dcn == {"data": 2, "fsdp": 1, "expert": 1}


def test_copies_lie_on_slices_each_where_no_factor_says_otherwise():
    assert Mesh(data=4, fsdp=-1).over_slices(2, 8) == Mesh(data=2, fsdp=-1, dcn={"data": 2})
    assert Mesh(data=-1, fsdp=4).over_slices(2, 16).sizes(16) == {"data": 4, "fsdp": 4}
    assert (mesh := Mesh(data=2, fsdp=2, dcn={"fsdp": 2})).over_slices(2, 8) is mesh
    assert (mesh := Mesh(data=2, fsdp=-1)).over_slices(1, 8) is mesh
    for mesh in (Mesh(fsdp=-1), Mesh(data=3, fsdp=-1)):
        with pytest.raises(UserError, match="form 2 slices"):
            mesh.over_slices(2, 12)


@pytest.mark.parametrize(
    ("mesh", "devices", "fits"),
    [
        (Mesh(fsdp=2, expert=4), 12, "--mesh fsdp=3,expert=4"),
        (Mesh(fsdp=2, expert=3), 8, "--mesh fsdp=2,expert=4"),
        (Mesh(fsdp=-1, expert=3), 8, "--mesh fsdp=-1,expert=4, or --mesh fsdp=-1,expert=2"),
        (Mesh(data=1, fsdp=-1, tensor=4, dcn={"data": 4}), 8, "--mesh data=1,fsdp=-1,tensor=2"),
        (Mesh(data=1, fsdp=2, dcn={"data": 4}), 6, "Mesh(data=1, fsdp=3, dcn={'data': 2})"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_one_that_does(mesh, devices, fits):
    with pytest.raises(UserError) as error:
        mesh.sizes(devices)
    assert error.value.instead.startswith(fits + ",")
    assert str(devices) in error.value.asked


@pytest.mark.parametrize("devices", [0, -1])
def test_a_number_of_devices_that_is_no_count_is_refused(devices):
    with pytest.raises(UserError, match=f"--devices {devices}\n") as error:
        Mesh(fsdp=-1).sizes(devices)
    assert error.value.instead == "--devices 8"
    with pytest.raises(UserError, match="more than 1,048,576"):
        Mesh(fsdp=-1).sizes(10**12)


@pytest.mark.parametrize("size", [0, -2, 2.0, True, "4"])
def test_a_factor_that_is_no_count_is_refused(size):
    with pytest.raises(UserError, match="axis 'fsdp'"):
        Mesh(fsdp=size)
    with pytest.raises(UserError, match="axis 'fsdp'"):
        Mesh(fsdp=-1, dcn={"fsdp": size})


def test_a_mesh_without_axes_two_rests_or_an_unknown_dcn_axis_are_refused():
    with pytest.raises(UserError, match="without axes"):
        Mesh()
    with pytest.raises(UserError, match="more than one axis"):
        Mesh(fsdp=-1, expert=-1)
    with pytest.raises(UserError, match="did you mean 'fsdp'"):
        Mesh(fsdp=-1, dcn={"fdsp": 2})
