from __future__ import annotations

import io
import json
import tarfile
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache import archive
from pwcc.cache.archive import END, ArchiveReader, Member, header, padding
from pwcc.cache.errors import CorruptEntry, NewerFormat
from pwcc.cache.ids import EntryKey, LookupKey

Form = Literal[0, 1, 2]
BLOB = "blobs/" + "a" * 64
KEYS = (LookupKey("1" * 32), EntryKey("2" * 32))


def member(name: str, data: bytes) -> bytes:
    return header(name, len(data)) + data + padding(len(data))


def foreign(info: tarfile.TarInfo, data: bytes = b"", *, form: Form = tarfile.USTAR_FORMAT) -> bytes:
    """A member as another program might write it, in an archive that is otherwise good."""
    info.size = info.size or len(data)
    return info.tobuf(form, "utf-8", "surrogateescape") + data + padding(len(data)) + END


def read(data: bytes) -> list[tuple[Member, bytes]]:
    reader = ArchiveReader(io.BytesIO(data), where="x.tar")
    found = []
    while (item := reader.next()) is not None:
        found.append((item, reader.read(item.size)))
    return found


def test_what_is_written_is_read_back_and_any_tar_program_can_read_it() -> None:
    data = member(archive.INDEX, b"{}") + member(BLOB, b"x" * 513) + END
    assert read(data) == [(Member(archive.INDEX, 2), b"{}"), (Member(BLOB, 513), b"x" * 513)]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == [archive.INDEX, BLOB]


@given(st.integers(0, archive.MAX_SIZE), st.sampled_from([BLOB, archive.INDEX]))
def test_every_header_is_one_block_that_says_name_and_size(size: int, name: str) -> None:
    block = header(name, size)
    assert len(block) == 512
    info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    assert (info.name, info.size, info.mode, info.mtime, info.uid, info.gid) == (name, size, 0o644, 0, 0, 0)


def test_the_form_is_fixed_to_the_byte() -> None:
    """Another Python's tarfile must write the same header, else its archives could not be imported."""
    expected = (
        BLOB.encode().ljust(100, b"\0")
        + b"0000644\0"
        + b"0000000\0" * 2
        + b"00000000005\0"
        + b"00000000000\0"
        + b"023143\0 0"
    ).ljust(257, b"\0") + b"ustar\x0000"
    assert header(BLOB, 5) == expected.ljust(512, b"\0")


def link(kind: bytes, name: str = BLOB) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


KINDS = {
    "a symbolic link": tarfile.SYMTYPE,
    "a hard link": tarfile.LNKTYPE,
    "a folder": tarfile.DIRTYPE,
    "a pipe": tarfile.FIFOTYPE,
    "a character device": tarfile.CHRTYPE,
    "a block device": tarfile.BLKTYPE,
    "a sparse file": tarfile.GNUTYPE_SPARSE,
    "an extended header": tarfile.XHDTYPE,
    "a global extended header": tarfile.XGLTYPE,
    "a long name": tarfile.GNUTYPE_LONGNAME,
    "type b'7'": tarfile.CONTTYPE,
}


@pytest.mark.parametrize(("words", "kind"), KINDS.items())
def test_only_regular_files_are_read(words: str, kind: bytes) -> None:
    with pytest.raises(CorruptEntry, match=words):
        read(foreign(link(kind)))


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../x",
        "blobs/../../x",
        "./" + BLOB,
        "blobs//" + "a" * 64,
        "blobs/" + "A" * 64,
        "blobs/" + "a" * 63,
        "entries/x/manifest.json",
        f"entries/{'1' * 32}/{'2' * 32}/signatures/../manifest.json",
        f"entries/{'1' * 32}/{'2' * 32}/other.json",
        "CACHEDIR.TAG",
        "blobs/" + "a" * 63 + "\u0661",
        BLOB + "\n",
        "",
    ],
)
def test_no_name_but_those_of_an_export_is_read(name: str) -> None:
    with pytest.raises(CorruptEntry):
        read(foreign(tarfile.TarInfo(name)))


def altered(field: str, value: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(BLOB)
    setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", 0o4755),
        ("uid", 1),
        ("gid", 1),
        ("mtime", 1),
        ("uname", "root"),
        ("linkname", "x"),
    ],
)
def test_a_header_that_says_more_is_refused(field: str, value: object) -> None:
    with pytest.raises(CorruptEntry, match="expected"):
        read(foreign(altered(field, value)))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_other_forms_of_tar_are_refused(form: Form) -> None:
    info = altered("size", 2**34)
    info.pax_headers = {"comment": "x" * 1000}
    with pytest.raises(CorruptEntry):
        read(foreign(info, form=form))


def test_a_size_in_another_base_is_refused() -> None:
    """GNU tar writes sizes beyond eight gigabytes in base 256, also negative ones."""
    block = bytearray(header(BLOB, 5))
    block[124:136] = b"\xff" * 12
    block[148:156] = b"%06o\0 " % (256 + sum(block[:148]) + sum(block[156:]))
    with pytest.raises(CorruptEntry):
        read(bytes(block) + END)


def test_a_file_of_another_kind_is_refused_with_advice() -> None:
    with pytest.raises(CorruptEntry, match=r"expected a tar header(.|\n)*pwcc export"):
        read(b"PK\x03\x04" + b"x" * 2000)


@pytest.mark.parametrize("junk", [b"x", b"\0" * 511 + b"x", b"\0" * 512])
def test_nothing_may_follow_the_end(junk: bytes) -> None:
    with pytest.raises(CorruptEntry, match="expected the end of the archive"):
        read(member(BLOB, b"x") + END + junk)


def test_a_lone_zero_block_is_no_end() -> None:
    with pytest.raises(CorruptEntry, match="expected the end"):
        read(bytes(512) + member(BLOB, b"x") + END)


def test_padding_must_be_zero() -> None:
    data = bytearray(member(BLOB, b"x") + END)
    data[513] = 1
    with pytest.raises(CorruptEntry, match="zero bytes"):
        read(bytes(data))


@pytest.mark.parametrize("cut", [0, 1, 511, 512, 513, 1023, 1024, 1025, 2047])
def test_an_archive_that_ends_too_early_is_refused(cut: int) -> None:
    with pytest.raises(CorruptEntry, match="ends too early"):
        read((member(BLOB, b"x" * 400) + END)[:cut])


def test_a_huge_size_costs_nothing_before_it_is_read() -> None:
    reader = ArchiveReader(io.BytesIO(header(BLOB, archive.MAX_SIZE)), where="x.tar")
    assert reader.next() == Member(BLOB, archive.MAX_SIZE)


def test_a_member_must_be_read_before_the_next() -> None:
    reader = ArchiveReader(io.BytesIO(member(BLOB, b"xy") + END), where="x.tar")
    reader.next()
    reader.read(1)
    with pytest.raises(CorruptEntry, match="1 bytes of a member were not read"):
        reader.next()


def test_the_index_names_entries_in_order() -> None:
    data = archive.index_bytes([KEYS])
    assert archive.parse_index(data, where="x") == (KEYS,)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"schema": 1, "entries": []},
        {"schema": 0, "entries": [KEYS]},
        {"schema": 1},
        {"schema": 1, "entries": [["x", "y"]]},
        {"schema": 1, "entries": [KEYS[:1]]},
        {"schema": 1, "entries": [KEYS, KEYS]},
        {"schema": 1, "entries": [("3" * 32, KEYS[1]), KEYS]},
        {"schema": 1, "entries": [KEYS], "more": 1},
    ],
)
def test_an_index_of_another_form_is_refused(value: object) -> None:
    with pytest.raises(CorruptEntry):
        archive.parse_index(json.dumps(value).encode(), where="x")


def test_a_newer_archive_is_named_so() -> None:
    with pytest.raises(NewerFormat, match="upgrade pwcc"):
        archive.parse_index(b'{"schema":2,"entries":{}}', where="x")


@given(st.data())
def test_a_changed_byte_changes_what_is_read_or_is_refused(data: st.DataObject) -> None:
    good = bytearray(member(archive.INDEX, b"{}") + member(BLOB, b"x" * 40) + END)
    expected = read(bytes(good))
    place = data.draw(st.integers(0, len(good) - 1))
    good[place] ^= data.draw(st.integers(1, 255))
    try:
        assert read(bytes(good)) != expected
    except CorruptEntry:
        return
