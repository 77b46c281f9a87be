"""Files on disk and in a store: whole or not at all, and one readable error for whatever the store raises."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator

import pytest
from botocore.exceptions import ClientError, NoCredentialsError

from shardwright.errors import LOST, UserError, exit_code_of
from shardwright.files.folder import TEMPORARY, Folder, StorageError
from tests.support.faults import ERRORS, Faults, faults_of


@pytest.fixture(params=["disk", "memory", "s3"])
def folder(request, tmp_path):
    roots = {"disk": lambda: tmp_path, "memory": lambda: "memory:/", "s3": lambda: request.getfixturevalue("s3")}
    return Folder(f"{roots[request.param]()}/{uuid.uuid4()}/out[1]*")  # no pattern, though fsspec takes patterns


@pytest.fixture(autouse=True)
def others(request) -> Iterator[None]:
    """Folders that the name would fit, were it a pattern: they stay as they are."""
    if "folder" not in request.fixturenames:
        yield
        return
    home = request.getfixturevalue("folder").parent
    for path in (home / "out1", home / "out1" / "old"):
        path.write("kept", b"")
    yield
    assert (home / "out1").names() == ["kept", "old"]
    assert (home / "out1" / "old").names() == ["kept"]


def test_what_is_written_is_read_listed_measured_and_removed(folder):
    assert folder.names() == []
    folder.write("a.json", b"first")
    folder.write("a.json", b"second")
    (folder / "sub").write("b", b"xyz")
    assert folder.names() == ["a.json", "sub"]
    assert folder.read("a.json") == b"second"
    assert (folder / "sub").size("b") == 3
    assert folder.exists("sub")
    assert not folder.exists("c")
    folder.remove_file("a.json")
    folder.remove_file("a.json")
    assert folder.names() == ["sub"]
    folder.remove()
    folder.remove()
    assert folder.names() == []


def test_a_folder_that_is_moved_takes_all_that_is_in_it_along(folder):
    (folder / "old").write("a", b"1")
    (folder / "old" / "sub").write("b", b"2")
    (folder / "old").move(folder / "new")
    assert folder.names() == ["new"]
    assert (folder / "new").names() == ["a", "sub"]
    assert (folder / "new" / "sub").read("b") == b"2"


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_what_the_disk_can_t_tell_is_an_error_and_no_no(error, tmp_path, monkeypatch):
    (tmp_path / "there").write_text("")

    def fail(*path: object, **more: object) -> None:
        raise OSError(error, os.strerror(error))

    for name in ("stat", "lstat", "listdir"):
        monkeypatch.setattr(os, name, fail)
    for ask in (Folder.exists, Folder.is_file, Folder.size, lambda folder, name: folder.names()):
        with pytest.raises(StorageError, match=r"look for|list|read") as told:
            ask(Folder(tmp_path), "there")  # type: ignore[operator]
        # no launcher starts a run again that has no permission, and each does after a fault that passes
        assert exit_code_of(told.value) == (2 if error == errno.EACCES else LOST)


def test_a_circle_of_links_is_an_error_and_no_no(tmp_path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(StorageError, match="look for"):
        Folder(tmp_path).exists("circle")


def fail(patch: pytest.MonkeyPatch, folder: Folder, names: tuple[str, ...], error: Exception) -> None:
    """Has the functions ``names`` of the folder's store raise ``error``."""

    def raises(*given: object, **more: object) -> None:
        raise error

    for name in names:
        patch.setattr(folder._fs, name, raises)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError("forbidden"), 2),
        (OSError("Forbidden: b/out"), 2),  # gcsfs
        (NoCredentialsError(), 2),
        (ValueError("Bad Request: forbidden"), 2),
        (TimeoutError("forbidden"), LOST),
        (ClientError({"Error": {"Code": "SlowDown", "Message": "forbidden"}}, "ListObjects"), LOST),
    ],
)
def test_what_a_store_can_t_tell_is_an_error_and_no_no(error, code, store, monkeypatch):
    folder = Folder(f"{store}/out")
    folder.write("there", b"")

    with monkeypatch.context() as patch:
        fail(patch, folder, ("info", "ls"), error)
        for ask in (Folder.exists, Folder.is_file, Folder.size, lambda folder, name: folder.names()):
            with pytest.raises(StorageError, match=r"(?i)forbidden|credentials") as told:
                ask(folder, "there")  # type: ignore[operator]
            assert exit_code_of(told.value) == code


@pytest.mark.parametrize("asked", ["info", "ls"])
def test_a_store_that_says_once_that_something_is_absent_is_asked_again(asked, store, monkeypatch):
    folder, said = Folder(f"{store}/out"), []
    folder.write("there", b"")
    real = getattr(folder._fs, asked)

    def absent_once(path: str, **more: object) -> object:
        said.append(path)
        if len(said) == 1:
            raise FileNotFoundError(path)
        return real(path, **more)

    monkeypatch.setattr(folder._fs, asked, absent_once)
    assert folder.exists("there")
    assert folder.names() == ["there"]
    assert said


def test_a_write_that_fails_in_a_store_leaves_the_old_file(store, monkeypatch):
    folder = Folder(f"{store}/out")
    folder.write("lineage.json", b"old")

    with monkeypatch.context() as patch:
        fail(patch, folder, ("open", "pipe_file"), TimeoutError("the network"))
        with pytest.raises(StorageError, match="the network"):
            folder.write("lineage.json", b"new")
    assert folder.read("lineage.json") == b"old"


def fill(folder: Folder) -> None:
    with folder.filling() as aside:
        aside.write("config.json", b"{}")
        (aside / "templates").write("tool.jinja", b"")
        with aside.writing("model.safetensors") as file:
            file.write(b"weights")


def test_a_folder_is_filled_whole_or_stays_as_it_was_whatever_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    folder, faults = Folder(tmp_path / "out"), Faults([str(tmp_path)], monkeypatch)
    (folder / TEMPORARY).write("config.json", b"left by one that was killed")
    with faults.watching():
        fill(folder)
    assert folder.names() == ["config.json", "model.safetensors", "templates"]
    operations, failed = faults.operations(), 0
    for at in operations:
        for fault in faults_of(at, *ERRORS):
            folder.remove()
            with contextlib.suppress(StorageError), faults.watching(at, fault):
                fill(folder)
            failed += faults.failed
            assert set(folder.names()) - {TEMPORARY} in (set(), {"config.json", "model.safetensors", "templates"}), at
            fill(folder) if not folder.exists("config.json") else None
    with capsys.disabled():
        print(f"\nfilling a folder: {len(operations)} operations, {failed} faults")


def test_a_folder_of_a_store_that_can_t_be_filled_is_empty(store):
    folder = Folder(f"{store}/out")

    def fail() -> None:
        with folder.filling() as aside:
            aside.write("config.json", b"{}")
            with aside.writing("model.safetensors"):
                raise OSError("the cable")

    with pytest.raises(StorageError, match="the cable"):
        fail()
    assert folder.names() == []
    fill(folder)
    assert folder.names() == ["config.json", "model.safetensors", "templates"]


def test_a_folder_is_no_file_and_neither_is_what_is_not_there(folder):
    (folder / "sub").write("b", b"xyz")
    assert folder.is_file("sub/b")
    assert not folder.is_file("sub")
    assert not folder.is_file("sub/c")


def test_what_is_reached_through_a_link_is_no_file_of_the_folder_s_own(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_bytes(b"")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").symlink_to(tmp_path / "there" / "file")
    (tmp_path / "here" / "sub").symlink_to(tmp_path / "there")
    assert not Folder(tmp_path / "here").is_file("file")
    assert not Folder(tmp_path / "here").is_file("sub/file")
    assert Folder(tmp_path).is_file("there/file")


def test_a_stream_is_there_when_it_ends(folder):
    with folder.open("stream", "wb") as file:
        file.write(b"0123")
        file.write(b"456789")
    with folder.open("stream", "rb") as file:
        file.seek(4)
        assert file.read(2) == b"45"


def test_a_stream_that_fails_leaves_no_file_behind(folder):
    folder.write("other", b"stays")

    def write_half() -> None:
        with folder.open("stream", "wb") as file:
            file.write(b"half")
            raise OSError("the cable")

    with pytest.raises(StorageError, match="the cable"):
        write_half()
    assert folder.names() == ["other"]


def test_a_file_that_is_not_there_names_itself(folder):
    with pytest.raises(StorageError, match=r"read .*out.*/nothing"):
        folder.read("nothing")


def test_a_path_is_the_same_folder_however_it_was_made(folder):
    assert folder / "a" / "b" == Folder(f"{folder}/a/b")
    assert (folder / "a").parent == folder
    assert (folder / "a").name == "a"


def test_a_failed_write_leaves_the_old_file_as_it_was(tmp_path):
    folder = Folder(tmp_path)
    folder.write("state.json", b"old")
    (tmp_path / ".state.json.tmp").mkdir()  # so that the write can't begin, also for root
    with pytest.raises(StorageError, match=r"state\.json"):
        folder.write("state.json", b"new")
    assert folder.read("state.json") == b"old"


def test_a_folder_where_a_file_lies_can_not_be_written_into(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StorageError, match="taken"):
        Folder(tmp_path / "taken").write("a", b"")
    assert os.listdir(tmp_path) == ["taken"]


@pytest.mark.parametrize(("scheme", "says"), [("gs", "gcsfs"), ("nosuch", "nosuch")])
def test_a_scheme_that_is_not_installed_says_what_to_install(scheme, says):
    with pytest.raises(UserError, match=says) as caught:
        Folder(f"{scheme}://bucket/run")
    assert "pip install" in str(caught.value)
