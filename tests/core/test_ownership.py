"""Folders and files that no other user of the machine can change."""

import os
import stat
import threading

import pytest

import testing
from ncclpy import ownership

OTHER = 12345


@pytest.fixture
def given_away(monkeypatch):
    """Return a function that makes a path appear to belong to another user."""
    theirs = set()
    plain, lstat, fstat = os.stat, os.lstat, os.fstat

    def changed(status):
        return (
            os.stat_result((*status[:4], OTHER, *status[5:])) if (status.st_dev, status.st_ino) in theirs else status
        )

    monkeypatch.setattr(os, "stat", lambda path, **options: changed(plain(path, **options)))
    monkeypatch.setattr(os, "lstat", lambda path, **options: changed(lstat(path, **options)))
    monkeypatch.setattr(os, "fstat", lambda fd: changed(fstat(fd)))

    def give_away(path):
        status = lstat(path)
        theirs.add((status.st_dev, status.st_ino))

    return give_away


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "above" / "folder"
    ownership.make_folder(str(made))
    return made


def test_new_folder_is_private(folder):
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder.parent, folder)] == [0o700] * 2
    assert ownership.why_foreign(folder) == ownership.why_foreign(folder, secret=True) == ""
    assert ownership.why_exposed(folder) == ""


def test_folder_of_another_user_is_named_with_both_users(folder, given_away):
    given_away(folder)
    words = f"belongs to user {OTHER}, and this process runs as user {os.geteuid()}"
    assert ownership.why_foreign(folder).startswith(words)
    assert ownership.why_exposed(folder).startswith(f"{folder} {words}")


def test_folder_of_another_user_is_trusted_by_its_owner_and_root_alone(folder, given_away, monkeypatch, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert ownership.why_owner_untrusted(folder) == ownership.why_owner_untrusted("/") == ""
    given_away(folder)
    for user in (OTHER, 0):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert ownership.why_owner_untrusted(folder) == ""
    monkeypatch.setattr(os, "geteuid", lambda: OTHER + 1)
    assert ownership.why_owner_untrusted(link) == f"belongs to user {OTHER}, and this process runs as user {OTHER + 1}"


def test_folder_that_others_can_write_to_is_foreign(folder):
    for mode, foreign, secret in (
        (0o755, False, True),
        (0o770, True, True),
        (0o702, True, True),
        (0o1777, True, True),
    ):
        folder.chmod(mode)
        assert (ownership.why_foreign(folder) != "", ownership.why_foreign(folder, secret=True) != "") == (
            foreign,
            secret,
        )
        assert (ownership.why_exposed(folder) != "") == foreign
    assert "its mode is 1777" in ownership.why_foreign(folder)


def test_links_and_files_are_foreign_folders(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").touch()
    assert ownership.why_foreign(tmp_path / "link").startswith("is a link")
    assert ownership.why_foreign(tmp_path / "file") == "is not a folder"


def test_folder_below_one_that_others_can_change_is_exposed(folder, given_away):
    folder.parent.chmod(0o777)
    assert ownership.why_exposed(folder) == f"{folder.parent} is open to other users, as its mode is 777"
    folder.parent.chmod(0o1777)  # sticky, as /tmp is: users can move only their own entries
    assert ownership.why_exposed(folder) == ""
    given_away(folder.parent)
    assert ownership.why_exposed(folder).startswith(f"{folder.parent} belongs to user {OTHER}")
    assert ownership.why_foreign(folder) == ""


def test_link_on_the_way_is_followed_unless_another_user_owns_it(folder, tmp_path, given_away):
    link = tmp_path / "link"
    link.symlink_to("above/../above")
    assert ownership.why_exposed(link / "folder") == ""
    folder.parent.chmod(0o777)
    assert ownership.why_exposed(link / "folder").startswith(f"{folder.parent} is open")
    folder.parent.chmod(0o700)
    given_away(link)
    assert ownership.why_exposed(link / "folder").startswith(f"{link} belongs to user {OTHER}")


def test_links_in_a_circle_end(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "more than 40 links" in ownership.why_exposed(tmp_path / "a")


def test_new_file_is_private(folder):
    os.close(ownership.open_own(folder / "file", os.O_WRONLY | os.O_CREAT))
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "another user's"])
def test_link_pipe_folder_or_file_of_another_user_is_refused_at_once(folder, given_away, kind):
    path, elsewhere = folder / "file", folder / "elsewhere"
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        given_away(path)
    words = {"link": "is a link", "another user's": f"belongs to user {OTHER}"}.get(kind, "is not an ordinary file")

    def opens():
        with pytest.raises(ownership.ForeignFile, match=words):
            ownership.open_own(path, os.O_RDONLY)
        return True

    before = threading.active_count()
    assert testing.run_with_deadline(opens)
    assert not elsewhere.exists() and threading.active_count() == before
