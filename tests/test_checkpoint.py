"""Checkpoints by themselves: any damage is noticed, the last two stay, and what does not fit is not loaded."""

import errno
import os
import pathlib
import shutil
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from routed.engine import batches, checkpoint
from routed.system import files
from routed.system.progress import Progress, Work


def test_a_stretch_is_what_fits_by_the_speed_of_the_last_one():
    progress = Progress([Work("group", 100, 1.0), Work("another", 100, 1.0)], batches=2)
    progress.begin(0)
    assert progress.steps_within(10, 50) == 1  # the pace is unknown
    progress.measure_pace(4, 2.0)
    progress.measure_pace(0, 7.0)  # an evaluation does not count
    # .5 s a step: 20 fit into 10 s, at most 8, at least 1.
    assert [progress.steps_within(10, 50), progress.steps_within(10, 8), progress.steps_within(0.1, 8)] == [20, 8, 1]
    progress.begin(1)
    assert progress.steps_within(10, 50) == 1
    assert list(batches._stretches(None, 10, 20, iter([1, 20, 4, 6]).__next__)) == [
        (0, 0),
        (0, 1),
        (1, 10),
        (10, 14),
        (14, 20),
    ]
    assert list(batches._stretches(17, 10, 20, lambda: 99)) == [(17, 20)]


def test_a_checkpoint_that_says_nothing_of_its_data_goes_on(tmp_path, monkeypatch):
    """A version before the digest of data saved the first; the second has the digest."""
    monkeypatch.setattr(checkpoint, "load", lambda path, meta, states, count: "loaded")
    for about in ({}, {"data": "text"}):
        saved = checkpoint.Checkpoint(tmp_path, {"runs": ["a"], "step": 10} | about)
        assert batches._resumed("fresh", saved, [SimpleNamespace(key="a")], "text") == ("loaded", 10)


@pytest.mark.parametrize(("dies", "left"), [("finish", True), ("prepare", False)])
def test_a_peer_that_dies_while_saving_into_a_bucket_costs_no_finished_checkpoint(tmp_path, monkeypatch, dies, left):
    """A bucket renames nothing: what is at the target is the checkpoint itself, whole from meta.json on."""

    def once(action):
        action()
        if action.__name__ == dies:
            raise RuntimeError("Gloo: connection closed by peer")

    monkeypatch.setattr(files, "remote", lambda path: path.name.isdigit())
    monkeypatch.setattr(files, "remove", lambda path: shutil.rmtree(path, ignore_errors=True))
    monkeypatch.setattr(checkpoint, "_state", lambda path: path.absolute() / "state")
    monkeypatch.setattr(checkpoint.hosts, "once", once)
    with pytest.raises(RuntimeError):
        checkpoint.save(tmp_path / "checkpoints", 1, ["a"], {"x": jnp.ones(1)})
    assert (checkpoint.latest(tmp_path / "checkpoints") is not None) == left


def test_a_copy_of_a_folder_is_whole_or_absent(tmp_path, monkeypatch):
    """The disk is full at the second of two files; then it is not, and remains of a kill are no part of the copy."""
    source, target = tmp_path / "source", tmp_path / "diverged" / "run"
    (source / "state").mkdir(parents=True)
    for name in ("meta.json", "state/w"):
        (source / name).write_text(name)
    write = pathlib.Path.write_bytes

    def write_one(path, content):
        if path.name == "w":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(pathlib.Path, "write_bytes", write_one)
        files.copy(source, target)
    assert not [*target.parent.iterdir()]
    left = target.with_name(".run.writing")
    left.mkdir()
    (left / "stale").write_text("")
    order = []
    monkeypatch.setattr(pathlib.Path, "write_bytes", lambda path, data: [order.append(path.name), write(path, data)])
    files.copy(source, target)
    assert order == ["w", "meta.json"]  # in a bucket files appear one by one, and meta.json says that all are there
    assert [*target.parent.iterdir()] == [target] and files.digest(target) == files.digest(source)


def flipped(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def halved(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_any_damage_to_a_checkpoint_is_noticed(tmp_path):
    for number in (1, 2):
        state = {"step": jnp.full(2, number), "w": jnp.ones((2, 50))}
        checkpoint.save(tmp_path / "root", number, ["a", "b"], state)
    meta = checkpoint.latest(tmp_path / "root")[1]
    assert (meta["runs"], meta["step"]) == (["a", "b"], 2)
    inside = [p.relative_to(tmp_path / "root") for p in (tmp_path / "root" / "000000002").rglob("*") if p.is_file()]
    assert len(inside) > 3  # Orbax's files and meta.json
    for name in inside:
        damages = (
            (lambda p: flipped(p, p.stat().st_size // 2), halved) if (tmp_path / "root" / name).stat().st_size else ()
        )
        for damage in (*damages, pathlib.Path.unlink):
            root = shutil.copytree(tmp_path / "root", tmp_path / "damaged")
            damage(root / name)
            assert checkpoint.latest(root)[1]["step"] == 1, (name, damage)
            shutil.rmtree(root)
    meta = tmp_path / "root" / "000000002" / "meta.json"
    for text in (meta.read_text().replace('"step": 2', '"step": 1'), meta.read_text().replace('"a"', '"c"'), "[]", "3"):
        meta.write_text(text)
        assert checkpoint.latest(tmp_path / "root")[1]["step"] == 1 and "000000001" in str(
            checkpoint.latest(tmp_path / "root")[0]
        )


def test_checkpoints_of_another_batch_do_not_push_out_new_ones(tmp_path):
    """A kill between the last table and the removal of its checkpoints leaves them behind, with higher numbers."""
    for number, run in ((8, "old"), (9, "old"), (1, "new"), (2, "new"), (3, "new")):
        checkpoint.save(tmp_path, number, [run], {"step": jnp.zeros(1)})
        meta = checkpoint.latest(tmp_path)[1]
        assert (meta["runs"], meta["step"]) == ([run], number)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000002", "000000003"]


def test_a_checkpoint_without_a_form_does_not_fit(tmp_path, monkeypatch):
    """A version that wrote no keys, shapes and types saved it."""
    state = {"a": jnp.zeros(2)}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_form", lambda state, count=None: None)
        checkpoint.save(tmp_path, 1, ["run", "another"], state)
    path, meta = checkpoint.latest(tmp_path)
    del meta["form"]
    assert checkpoint.load(path, meta, state, 2) is None
