"""The two files of a batch job: checks before the job, and interference by other programs.

The files are real; the oracle is the output of an undisturbed job.
"""

import errno
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.batch import written
from llama.cli.batch.files import Line, Results, check_files, read_lines
from llama.cli.batch.job import run_batch
from llama.cli.model import sampling_params

fork = multiprocessing.get_context("fork")


def in_child(call: Callable[[], None]) -> None:
    """Run the call in a forked process; fail if it fails."""
    child = fork.Process(target=call)
    child.start()
    child.join()
    assert child.exitcode == 0


def refused(kind: type[Exception], message: str, in_path: object, out_path: object) -> None:
    with pytest.raises(kind, match=message):
        check_files(str(in_path), str(out_path), resume=False)


def test_what_cannot_be_used_is_refused_before_the_model_is_loaded(tmp_path):
    """An unusable file is refused before the model is loaded; no check leaves a file behind."""
    (tmp_path / "in").write_text("hello\n")
    check_files(str(tmp_path / "in"), str(tmp_path / "out"), resume=False)
    refused(ValueError, "is a folder or a device", tmp_path / "in", tmp_path)
    refused(ValueError, "is a folder or a device", tmp_path / "in", "/dev/null")
    refused(OSError, "results cannot be written there", tmp_path / "in", tmp_path / "none" / "out")
    refused(OSError, "results cannot be written there", tmp_path / "in", "/proc/out")
    (tmp_path / "link").symlink_to("/proc/out")
    refused(OSError, "results cannot be written there", tmp_path / "in", tmp_path / "link")
    refused(ValueError, "is a folder: name a file with a request", tmp_path, tmp_path / "out")
    refused(FileNotFoundError, "none", tmp_path / "none", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "link"]


def test_an_output_without_permission_is_refused_before_the_model_is_loaded():
    with tempfile.TemporaryDirectory() as name:  # every user can enter it, unlike tmp_path
        folder = Path(name)
        (folder / "in").write_text("hello\n")
        (folder / "out").touch()
        (folder / "out").chmod(0o444)
        folder.chmod(0o555)

        def as_nobody() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)  # root may write everywhere
            for out in ("out", "new"):
                refused(PermissionError, "results cannot be", folder / "in", folder / out)

        in_child(as_nobody)
        folder.chmod(0o755)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_told_with_the_remedy(encoding, tmp_path):
    """Other encodings are reported with the remedy.

    The error comes before the model is loaded; for a pipe, which is not read in advance, at its
    first line.
    """
    (tmp_path / "in").write_bytes("hello\nworld\n".encode(encoding))
    message = "in is not UTF-8: if it is UTF-16, convert it with iconv -f UTF-16 -t UTF-8"
    refused(ValueError, message, tmp_path / "in", tmp_path / "out")
    with (tmp_path / "in").open("rb") as file, pytest.raises(ValueError, match=message):
        list(read_lines(file, ""))


def test_two_jobs_cannot_write_one_file(tmp_path):
    """Two jobs cannot write one file.

    Neither two processes nor one process can; nor can they after this process has read the file,
    which would release the locks of lockf: the jobs would repeat each other's work and double the
    ids.
    """
    path = tmp_path / "out"

    def is_refused() -> None:
        with pytest.raises(ValueError, match="is being written by another job"):
            Results(str(path))

    results = Results(str(path))
    path.read_bytes()
    is_refused()
    in_child(is_refused)
    results.close()
    in_child(lambda: Results(str(path)).close())
    Results(str(path)).close()


def test_a_job_does_not_start_on_the_output_of_another(llama, tmp_path):
    (tmp_path / "in").write_text("hello\n")
    other = Results(str(tmp_path / "out"))
    with pytest.raises(ValueError, match="is being written by another job"):
        run_batch(
            llama, str(tmp_path / "in"), str(tmp_path / "out"), sampling_params(), resume=True
        )
    other.close()


def test_a_file_system_without_locks_serves_one_rank(llama, tmp_path, monkeypatch):
    def no_locks(*args: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    for name in ("fcntl", "lockf"):
        monkeypatch.setattr(f"fcntl.{name}", no_locks)
    (tmp_path / "in").write_text("hello\nworld\n")
    paths = str(tmp_path / "in"), str(tmp_path / "out")
    run_batch(llama, *paths, sampling_params(max_gen_len=2))
    assert len((tmp_path / "out").read_bytes().splitlines()) == 2
    with pytest.raises(OSError, match="no locks, which several ranks need"):
        Results(str(tmp_path / "out"), first=False, max_lines=2)


@pytest.mark.parametrize("has_ofd_locks", [True, False])
def test_a_writer_cuts_off_what_another_left(tmp_path, monkeypatch, has_ofd_locks):
    """A writer cuts off the partial record of another.

    A replica is killed in the middle of a write while another goes on; on kernels with locks per
    open file, and on those with locks per process.
    """
    if not has_ofd_locks:
        monkeypatch.setattr("sys.platform", "other")
    line = Line(1, b"hello", 7)
    first, second = Results(str(tmp_path / "out")), Results(str(tmp_path / "out"), first=False)
    first.append(line, {"a": 1})
    with (tmp_path / "out").open("ab") as dying:
        dying.write(b'{"id": "batch_req_00' + b"x" * 200_000)
    second.append(line, {"a": 2})
    found = [json.loads(r) for r in (tmp_path / "out").read_text().splitlines()]
    assert [record["a"] for record in found] == [1, 2]
    first.close()
    second.close()


def replace(path: Path) -> None:
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").replace(path)


def cut(path: Path) -> None:
    os.truncate(path, 100)


def overwrite(path: Path) -> None:
    path.write_bytes(b"x" * (path.stat().st_size - 1) + b"\n")


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (Path.unlink, "out was deleted while the job ran, so results are lost"),
    (replace, "out was replaced by another file while the job ran"),
    (cut, r"out (was truncated from \d+ to \d+ bytes|has 0 records instead of 8) while"),
    (overwrite, r"out has \d records instead of 8 while the job ran"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("after", [3, 8])
def test_a_lost_output_is_an_error(llama, tmp_path, monkeypatch, damage, message, after):
    """A lost output is an error.

    Another program changes the output in the middle of a job, or after its last record.
    """
    append, count = Results.append, []

    def append_and_damage(self: Results, *args: Any) -> None:
        append(self, *args)
        count.append(1)
        if len(count) == after:
            damage(tmp_path / "out")

    monkeypatch.setattr(Results, "append", append_and_damage)
    (tmp_path / "in").write_bytes(b"hello\n" * 8)
    paths = str(tmp_path / "in"), str(tmp_path / "out")
    with pytest.raises(OSError, match=message):
        run_batch(llama, *paths, sampling_params(max_gen_len=3))
    assert not llama.engine.has_unfinished()
    if damage is not overwrite:  # only the final check of all records finds that
        assert len(count) == after, "the job ends at the next record, not after hours"


def test_an_input_cut_while_it_is_read_is_an_error(llama, tmp_path, monkeypatch):
    """An input that is truncated while it is read is an error.

    Half a line is not answered; when the file is restored, the job is resumed.
    """
    lines = [{"prompt": "hello", "user": "x" * 50_000, "max_tokens": 2}] * 30
    whole = written(lines)
    (tmp_path / "in").write_bytes(whole)
    append = Results.append

    def append_and_cut(self: Results, *args: Any) -> None:
        append(self, *args)
        os.truncate(tmp_path / "in", 1_025_000)

    with monkeypatch.context() as patch:
        patch.setattr(Results, "append", append_and_cut)
        with pytest.raises(
            ValueError, match=r"had 15\d+ bytes and was truncated to 1025000 while the"
        ):
            run_batch(llama, str(tmp_path / "in"), str(tmp_path / "out"), sampling_params())
    assert not llama.engine.has_unfinished()
    (tmp_path / "in").write_bytes(whole)
    report = run_batch(
        llama, str(tmp_path / "in"), str(tmp_path / "out"), sampling_params(), resume=True
    )
    assert 10 <= report.written < 30 and report.failed == 0
    assert len((tmp_path / "out").read_bytes().splitlines()) == 30
