"""KV pages on disk without a model: what a process finds that others wrote, damaged or removed."""

import errno
import fcntl
import hashlib
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.launch import environment
from llama.storage import kv_disk, kv_folder, kv_writer
from llama.storage.kv_disk import clear, secret_of, stored_models, tenants_of
from llama.storage.kv_folder import Identity, KVFolder
from llama.storage.kv_segments import HEADER_BYTES, Part, tenant_tag
from llama.storage.kv_writer import KVWriter

PART = Part(first_layer=0, num_layers=2, first_head=0, num_heads=4, head_bytes=24)
IDENTITY = Identity("/models/Small", {"dtype": "bf16", "weights": "a"}, {"kernels": "avx2"})
LIMIT = 1 << 20
SMALL = 1 << 16  # bytes of a segment


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def page_of(number: int, part: Part = PART) -> bytes:
    """Return a page, of which each head depends on its number in the model."""
    heads = [hashlib.sha256(b"%d %d" % (number, head)).digest() for head in part.heads]
    return b"".join(head[: part.head_bytes] for head in heads)


def read(folder: KVFolder, number: int) -> bytes | None:
    """Return a page that a folder finds; None where it finds none."""
    page = bytearray(folder.part.page_bytes)
    return bytes(page) if folder.read_into(key_of(number), memoryview(page)) else None


def opened(root: Path, part: Part = PART, identity: Identity = IDENTITY, **options) -> KVFolder:
    return KVFolder(root, identity, part, **options)


def write(root: Path, numbers, part: Part = PART, identity: Identity = IDENTITY):
    """Write pages as a process of its own would, and return the segment that has them."""
    folder = opened(root, part, identity)
    writer = KVWriter(folder, LIMIT, SMALL)
    for number in numbers:
        assert writer.append(key_of(number), memoryview(page_of(number, part)))
    writer.close()
    folder.close()
    return folder.path


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(kv_disk, "_MIN_FREE", 0)
    monkeypatch.setattr(kv_disk, "_MIN_FREE_PART", 0)
    monkeypatch.setattr(kv_folder, "_REFRESH_S", 0)
    return tmp_path / "kv"


def segment_of(root: Path) -> Path:
    (path,) = root.glob("*/*.kv")
    return path


def test_a_later_process_reads_what_was_written(root):
    """A later process finds every page, goes on with the same file, and nobody else can read it."""
    for first in (0, 5):
        write(root, range(first, first + 5))
    folder = opened(root)
    assert [read(folder, i) for i in range(10)] == [page_of(i) for i in range(10)]
    assert read(folder, 10) is None and key_of(10) not in folder
    assert segment_of(root).stat().st_size == HEADER_BYTES + 10 * PART.record_bytes
    modes = {path.stat().st_mode & 0o777 for path in root.rglob("*")}
    assert modes == {0o700, 0o600} and root.stat().st_mode & 0o777 == 0o700


def test_pages_of_something_else_are_never_found(root):
    """Other weights, layers, another rounding or another size of heads find nothing."""
    write(root, range(3))
    others = {
        "weights": (PART, Identity("/models/Small", {"dtype": "bf16", "weights": "b"}, {})),
        "numerics": (PART, Identity("/models/Small", IDENTITY.content, {"kernels": "amx"})),
        "layers": (PART._replace(first_layer=2), IDENTITY),
        "bytes": (PART._replace(head_bytes=12), IDENTITY),
    }
    for name, (part, identity) in others.items():
        assert read(opened(root, part, identity), 0) is None, name
    _, other = others["numerics"]
    assert read(opened(root, identity=other, is_exact=False), 0) == page_of(0)


@pytest.mark.parametrize("counts", [(4,), (2, 2), (1, 2, 1)])
def test_any_ranks_read_what_other_ranks_wrote(root, counts):
    """Heads that several ranks wrote are found by ranks with other shares, if they have them."""
    start = 0
    for count in counts:
        write(root, range(4), PART._replace(first_head=start, num_heads=count))
        start += count
    for first, count in [(0, 4), (0, 3), (1, 2), (3, 1)]:
        part = PART._replace(first_head=first, num_heads=count)
        assert read(opened(root, part), 2) == page_of(2, part)
    beyond = PART._replace(first_head=2, num_heads=3)
    assert read(opened(root, beyond), 2) is None


def test_no_changed_byte_is_read(root):
    """A page is found as it was, or not at all, whichever byte of a file is changed."""
    path = write(root, range(2)) and segment_of(root)
    whole = path.read_bytes()
    num_missed = 0
    zeros = [place for place, value in enumerate(whole) if not value]
    for place in sorted({*range(len(whole))} - {*zeros} | {*zeros[::40]}):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        folder = opened(root)
        found = [read(folder, i) for i in range(2)]
        assert all(page in (None, page_of(i)) for i, page in enumerate(found)), place
        num_missed += None in found
        folder.close()
    assert num_missed >= 0.9 * (2 * PART.page_bytes + 2 * (32 + 16 * PART.num_heads + 4))


def test_a_cut_file_has_the_records_that_are_whole(root):
    """A file that ends in a record, or in zeros as after a power loss, has those before it."""
    path = write(root, range(3)) and segment_of(root)
    whole = path.read_bytes()
    last = HEADER_BYTES + 2 * PART.record_bytes
    for end in [0, 100, HEADER_BYTES, *range(last - 2, len(whole), 97)]:
        for content in (whole[:end], whole[:end].ljust(len(whole), b"\0")):
            path.write_bytes(content)
            folder = opened(root)
            found = [read(folder, i) for i in range(3)]
            folder.close()
            assert all(page in (None, page_of(i)) for i, page in enumerate(found)), end
            assert found[2] is None or end > last + PART.page_bytes
            assert found[1] == page_of(1) or end < last


def test_a_page_that_changed_under_a_reader_is_written_again(root):
    """A page that was damaged after it was found is a miss, is counted, and is written again."""
    path = write(root, range(2)) and segment_of(root)
    folder = opened(root)
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES * 2] ^= 1
    path.write_bytes(content)
    assert key_of(0) in folder and read(folder, 0) is None and folder.num_damaged == 1
    assert key_of(0) not in folder
    writer = KVWriter(folder, LIMIT, SMALL)
    assert writer.append(key_of(0), memoryview(page_of(0))) and read(folder, 0) == page_of(0)


_WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from storage.test_kv_pages import *
folder = opened(Path(sys.argv[1]))
kv_disk._MIN_FREE = kv_disk._MIN_FREE_PART = 0
writer = KVWriter(folder, LIMIT, SMALL)
for number in range(int(sys.argv[3]), 10**9):
    assert writer.append(key_of(number), memoryview(page_of(number)))
    print(number, flush=True)
"""


def test_kill_9_leaves_what_was_reported(root):
    """Every page that a killed process had reported is found, unless it was removed for room."""
    tests = str(Path(__file__).resolve().parents[1])
    for start in range(0, 4000, 1000):
        command = [sys.executable, "-c", _WRITER, str(root), tests, str(start)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment(PYTHONPATH=tests)
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(random.uniform(0, 0.02))
        process.kill()
        rest = process.stdout.read()
        assert process.wait() == -signal.SIGKILL
        reported = [int(line) for line in (first + rest).split("\n")[:-1]]
        folder = opened(root)
        for number in reported[-100:]:
            assert read(folder, number) == page_of(number)
        assert sum(path.stat().st_size for path in root.glob("*/*.kv")) <= LIMIT
        folder.close()


def test_the_limit_counts_every_file(root):
    """Segments of any model are removed, the one unused for longest first, and none in use."""
    other = Identity("/models/Other", {"weights": "other"}, {})
    old = write(root, range(3), identity=other)
    os.utime(next(old.glob("*.kv")), (1, time.time() - 3600))
    folder = opened(root)
    writer = KVWriter(folder, 4 * SMALL, SMALL)
    fitting = (SMALL - HEADER_BYTES) // PART.record_bytes
    for number in range(8 * fitting):
        assert writer.append(key_of(number), memoryview(page_of(number)))
        total = sum(path.stat().st_size for path in root.glob("*/*.kv"))
        assert total <= 4 * SMALL
    assert not list(old.glob("*.kv"))
    assert read(folder, 8 * fitting - 1) and read(folder, 0) is None
    full = KVWriter(opened(root), HEADER_BYTES, SMALL)
    assert not full.append(key_of(-1), memoryview(page_of(-1)))


def test_the_limit_holds_for_ranks_that_write_at_once(root):
    """Files of several ranks, which grow alike, are counted as large as they may become."""
    parts = [PART._replace(first_head=head, num_heads=1) for head in range(4)]
    folders = [opened(root, part) for part in parts]
    writers = [KVWriter(folder, 8 * SMALL, SMALL, num_writers=4) for folder in folders]
    fitting = (SMALL - HEADER_BYTES) // parts[0].record_bytes
    for number in range(5 * fitting):
        for part, writer in zip(parts, writers, strict=True):
            assert writer.append(key_of(number), memoryview(page_of(number, part)))
        assert sum(path.stat().st_size for path in root.glob("*/*.kv")) <= 8 * SMALL
    for part, folder in zip(parts, folders, strict=True):
        assert read(folder, number) == page_of(number, part)
    few = [KVWriter(folder, 2 * SMALL, SMALL, num_writers=4) for folder in folders]
    for part, writer in zip(parts, few, strict=True):
        assert writer.append(key_of(-1), memoryview(page_of(-1, part))), "one has no room"


def test_one_process_at_a_time_makes_a_segment(root, monkeypatch):
    """What the limit leaves is not counted while another process makes a segment."""
    make_room = KVWriter._make_room
    counted: list[int] = []

    def checked(writer: KVWriter, num_bytes: int) -> bool:
        if num_bytes:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            counted.append(num_bytes)
        return make_room(writer, num_bytes)

    monkeypatch.setattr(KVWriter, "_make_room", checked)
    writer = KVWriter(opened(root), LIMIT, SMALL)
    other = os.open(root, os.O_RDONLY)
    assert writer.append(key_of(0), memoryview(page_of(0))) and len(counted) == 1
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_lower_limit_holds_from_the_start(root):
    """A process with a lower limit than the one before removes what is beyond it."""
    folder = opened(root)
    writer = KVWriter(folder, 8 * SMALL, SMALL)
    for number in range(80):
        assert writer.append(key_of(number), memoryview(page_of(number)))
    writer.close()
    assert len(list(root.glob("*/*.kv"))) > 3
    KVWriter(opened(root), 3 * SMALL, SMALL)
    assert sum(path.stat().st_size for path in root.glob("*/*.kv")) <= 3 * SMALL
    assert read(opened(root), 79) == page_of(79)


def test_a_process_leaves_the_files_of_others_alone(root):
    """Two processes write files of their own, and each finds what the other has written."""
    folders = [opened(root), opened(root)]
    writers = [KVWriter(folder, LIMIT, SMALL) for folder in folders]
    for number in range(20):
        assert writers[number % 2].append(key_of(number), memoryview(page_of(number)))
    assert len(list(root.glob("*/*.kv"))) == 2
    for folder in folders:
        folder.refresh()
        assert [read(folder, i) for i in range(20)] == [page_of(i) for i in range(20)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_an_error_of_the_disk_stops_writing(root, monkeypatch, caplog, code):
    """After an error nothing is written for a minute, with one line in the log; reading goes on."""
    write(root, range(2))
    folder = opened(root)
    writer = KVWriter(folder, LIMIT, SMALL)

    def failing(descriptor, content, start):
        if len(content) < HEADER_BYTES:
            return len(content) // 2 or len(content)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", failing)
    for number in (2, 3):
        assert not writer.append(key_of(number), memoryview(page_of(number)))
    monkeypatch.undo()
    assert not writer.append(key_of(3), memoryview(page_of(3)))
    assert len(caplog.records) == 1 and os.strerror(code) in caplog.text
    assert [read(folder, i) for i in range(3)] == [page_of(0), page_of(1), None]
    assert [read(opened(root), i) for i in range(3)] == [page_of(0), page_of(1), None]


def test_the_writes_of_a_day_are_bounded(root, monkeypatch):
    """At most four times the limit is written within a day, over all processes.

    As much again is written of texts that others continue.
    """
    monkeypatch.setattr(kv_writer, "_COUNTED_BYTES", 1)
    small = 1 << 15
    for number in range(100):
        writer = KVWriter(opened(root), 2 * small, small)
        if not writer.append(key_of(number), memoryview(page_of(number))):
            break
        writer.close()
    assert 8 * small <= number * PART.record_bytes <= 8 * small + 2 * PART.record_bytes
    writer = KVWriter(opened(root), 2 * small, small)
    for further in range(number + 1, 200):
        if not writer.append(key_of(further), memoryview(page_of(further)), is_continued=True):
            break
    assert 16 * small <= further * PART.record_bytes <= 16 * small + 4 * PART.record_bytes
    writer.close()
    entries = (root / "written").read_bytes()
    yesterday = int(time.time()) - 90_000
    (root / "written").write_bytes(struct.pack("<QQ", yesterday, 16 * small) * (len(entries) // 16))
    assert KVWriter(opened(root), 2 * small, small).append(key_of(-1), memoryview(page_of(-1)))


def test_what_was_not_used_for_a_week_is_removed(root):
    path = write(root, range(2)) and segment_of(root)
    for days, is_there in ((6.9, True), (7.1, False)):
        used = time.time() - days * 86_400
        os.utime(path, (used, used))
        KVWriter(opened(root), LIMIT, SMALL)
        assert path.exists() == is_there


def test_pages_are_listed_and_removed_by_tenant(root):
    """A tenant's name is a hash; its files are removed, and those of others stay."""
    tags = [tenant_tag(root) for root in (b"", b"a" * 32, b"b" * 32)]
    assert tags[0] == b"" and len(set(tags)) == 3
    folder = opened(root)
    for group in ((0, 1), (2,)):
        writer = KVWriter(folder, LIMIT, HEADER_BYTES + 3 * PART.record_bytes)
        for number in range(3):
            key = key_of(10 * group[0] + number)
            assert writer.append(key, memoryview(page_of(number)), tags[group[number % len(group)]])
        writer.close()
    names = [tag.hex() for tag in tags]
    assert tenants_of(folder.path) == dict(
        zip(names, [n * PART.record_bytes for n in (2, 1, 3)], strict=True)
    )
    assert clear(root, tenant=tags[1].hex()) == HEADER_BYTES + 3 * PART.record_bytes
    assert tenants_of(folder.path) == {names[2]: 3 * PART.record_bytes}
    assert clear(root, tenant="0") == 0 and clear(root, tenant=names[2]) > 0
    assert not tenants_of(folder.path)


def test_the_list_and_the_deletion(root):
    """`clear` removes what it is asked for, and all in the end; a writer goes on in a new file."""
    write(root, range(3), identity=Identity("/models/Other", {"weights": "c"}, {}))
    folder = opened(root)
    writer = KVWriter(folder, LIMIT, SMALL)
    assert writer.append(key_of(0), memoryview(page_of(0)))
    secret = secret_of(root)
    assert secret == secret_of(root) and len(secret) == 32
    assert [Path(stored.model).name for stored in stored_models(root)] == ["Small", "Other"]
    assert clear(root, days=1) == 0
    assert clear(root, model="Other") == HEADER_BYTES + 3 * PART.record_bytes
    assert [stored.model for stored in stored_models(root)] == ["/models/Small"]
    clear(root)
    assert not list(root.iterdir())
    folder.refresh()
    assert read(folder, 0) is None
    numbers = [
        number
        for number in range(1, 4)
        if writer.append(key_of(number), memoryview(page_of(number)))
    ]
    assert numbers == [2, 3] and read(opened(root), 3) == page_of(3)


def test_the_deletion_leaves_other_files_alone(tmp_path):
    """A folder that was given by mistake loses nothing."""
    (tmp_path / "photos").mkdir()
    for name in ("secret", "written", "photos/one.kv"):
        (tmp_path / name).write_text("text")
    before = sorted(tmp_path.rglob("*"))
    assert clear(tmp_path) == 0 and not stored_models(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_others_can_enter_is_refused(root):
    root.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        opened(root)
