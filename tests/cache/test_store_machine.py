"""A store against a plain dictionary, through any order of what people, crashes and bad disks do to it.

The dictionary says which entries are there, who signed each, which files were damaged. After every step the
store must hold exactly those entries, give out the undamaged ones whole, and refuse the damaged ones. Torch
is not needed. What SIGKILL does at each step is for ``test_crash.py``; here a crash is an exception that no
handler expects, at a step that Hypothesis picks.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pwcc.cache import failpoints, pins, signing
from pwcc.cache.errors import CorruptEntry, StoreError, UntrustedEntry
from pwcc.cache.exporting import export_stream
from pwcc.cache.findings import Kind
from pwcc.cache.gc import collect
from pwcc.cache.ids import BlobDigest
from pwcc.cache.importing import import_stream
from pwcc.cache.manifest import Manifest
from pwcc.cache.repair import repair
from pwcc.cache.retention import Limits
from pwcc.cache.signing_keys import KeyId, PrivateKey
from pwcc.cache.store import EntryRef, Store
from pwcc.cache.trust import SignaturePolicy, TrustedKey
from pwcc.cache.verify import verify
from tests.cache.conftest import put_blobs

NAMES = ("alpha", "beta")  # few, so that the steps meet
KEYS = (PrivateKey.generate(), PrivateKey.generate())
MEMORY = Path("/dev/shm")  # a memory file system: thousands of flushes to a disk would be the whole test
names, keys = st.sampled_from(NAMES), st.sampled_from(KEYS)


class Crash(BaseException):
    """The end of a process, as far as the code that was running is concerned."""


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x01
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def fill(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


HARM: tuple[Callable[[Path], None], ...] = (flip, cut, fill, Path.unlink)


class StoreMachine(RuleBasedStateMachine):
    """``signers`` is the model: entry to the keys that signed it; ``bad`` and ``broken`` are the damage."""

    manifests: ClassVar[dict[str, Manifest]] = {}

    @initialize(present=st.sets(names))
    def start(self, present: set[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pwcc-machine-", dir=MEMORY if MEMORY.is_dir() else None))
        self.store = Store.create(self.folder / "store 0")
        self.copies = 0
        self.signers: dict[str, set[KeyId]] = {}
        self.pinned: set[str] = set()
        self.bad: set[BlobDigest] = set()  # blobs that are not what their name says
        self.broken: set[str] = set()  # entries whose manifest is damaged
        if not self.manifests:
            scratch = Store.create(self.folder / "scratch")
            self.manifests.update((name, put_blobs(scratch, name=name)) for name in NAMES)
        for name in sorted(present):
            self.write(name)

    def teardown(self) -> None:
        failpoints.install(None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def ref(self, name: str, store: Store | None = None) -> EntryRef:
        manifest = self.manifests[name]
        return (store or self.store).entry_ref(manifest.lookup_key, manifest.entry_key)

    def is_whole(self, name: str) -> bool:
        intact = not self.bad & self.manifests[name].blobs.keys()
        return name in self.signers and name not in self.broken and intact

    # Writers

    @rule(name=names, ends=st.booleans())
    def compile(self, name: str, ends: bool) -> None:
        """A compile, or one that ends before it publishes."""
        if ends:
            self.write(name)
        else:
            assert put_blobs(self.store, name=name) == self.manifests[name]
            self.bad -= self.manifests[name].blobs.keys()

    def write(self, name: str) -> None:
        put_blobs(self.store, name=name)
        won = self.store.publish(self.manifests[name]).won
        assert won is (name not in self.signers or name in self.broken)
        self.bad -= self.manifests[name].blobs.keys()
        self.published(name)

    def published(self, name: str) -> None:
        if name in self.broken:
            self.signers.pop(name)
            self.broken.discard(name)
        self.signers.setdefault(name, set())

    @rule(name=names, point=st.sampled_from(failpoints.POINTS), left=st.integers(1, 20))
    def crash(self, name: str, point: str, left: int) -> None:
        """A writer that ends at a step: afterwards there is the old state or the new one."""

        def hook(passed: str) -> None:
            nonlocal left
            left -= passed == point
            if passed == point and left == 0:
                raise Crash

        failpoints.install(hook)
        try:
            put_blobs(self.store, name=name)
            self.store.publish(self.manifests[name])
        except Crash:
            pass
        finally:
            failpoints.install(None)
        for digest in [*self.bad & self.manifests[name].blobs.keys()]:
            if self.can_read(digest):
                self.bad.discard(digest)
        try:
            assert self.store.read_manifest(self.ref(name)) == self.manifests[name]
        except CorruptEntry:
            assert name not in self.signers or name in self.broken, "what was whole is gone"
            if not self.ref(name).path.exists():  # it was set aside already
                self.signers.pop(name, None)
                self.broken.discard(name)
        else:
            self.published(name)

    def can_read(self, digest: BlobDigest) -> bool:
        try:
            self.store.read_blob(digest)
        except CorruptEntry:
            return False
        return True

    @rule(old=st.booleans())
    def leave_files_behind(self, old: bool) -> None:
        """What SIGKILL leaves in ``tmp``; the next writer may sweep it."""
        for path in (self.store.tmp / "00ff00ff-0000", self.store.tmp / "dead" / "manifest.json"):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b'{"about":')
            if old:
                os.utime(path, (1, 1))
                os.utime(path.parent if path.parent != self.store.tmp else path, (1, 1))
        self.store = Store.create(self.store.root)

    # Signatures

    @rule(name=names, key=keys)
    def sign(self, name: str, key: PrivateKey) -> None:
        if self.is_whole(name):
            signing.sign_entry(self.store, self.ref(name), key)
            self.signers[name].add(key.public.id)
            return
        try:
            signing.sign_entry(self.store, self.ref(name), key)
        except CorruptEntry:
            return
        raise AssertionError("a damaged entry was signed")

    @rule(name=names, key=keys)
    def read_signed(self, name: str, key: PrivateKey) -> None:
        store = Store.open(self.store.root)
        store.require(SignaturePolicy((TrustedKey(key.public, "it"),), self.folder).admit)
        if name in self.signers and name not in self.broken:
            try:
                assert store.read_manifest(self.ref(name)) == self.manifests[name]
                admitted = True
            except UntrustedEntry:
                admitted = False
            assert admitted is (key.public.id in self.signers[name])

    # Damage, and looking for it

    @precondition(lambda self: self.signers)
    @rule(name=names, number=st.integers(0, 40), harm=st.sampled_from(HARM))
    def damage(self, name: str, number: int, harm: Callable[[Path], None]) -> None:
        """A blob, or about every other time a manifest."""
        blobs = list(self.manifests[name].blobs)
        if number < len(blobs):
            path = self.store.blob_path(blobs[number])
            if path.exists():
                path.chmod(0o644)
                harm(path)
                self.bad.add(blobs[number])
        elif name in self.signers and name not in self.broken and harm is not Path.unlink:
            path = self.ref(name).manifest
            path.chmod(0o644)
            harm(path)
            self.broken.add(name)

    @rule()
    def verify(self) -> None:
        found = verify(self.store, now=time.time())
        kinds = {finding.kind for finding in found.findings}
        assert (Kind.ENTRY in kinds) is bool(self.broken) or bool(self.damaged() - self.broken)
        assert Kind.BLOB in kinds or not self.damaged() - self.broken
        if not self.damaged() and not self.bad:
            assert not kinds & {Kind.ENTRY, Kind.BLOB, Kind.TRUST, Kind.UNREADABLE}

    def damaged(self) -> set[str]:
        return {name for name in self.signers if not self.is_whole(name)}

    @rule()
    def repair(self) -> None:
        """Nothing that is whole goes; what is damaged is set aside, and the next look finds nothing."""
        repair(self.store, verify(self.store, now=time.time()))
        for name in self.damaged():
            self.signers.pop(name)
        self.broken.clear()
        again = verify(self.store, now=time.time())
        assert not {finding.kind for finding in again.findings} & {Kind.ENTRY, Kind.BLOB}

    # Collections and removal

    @rule(name=names, on=st.booleans())
    def pin(self, name: str, on: bool) -> None:
        if not on:
            pins.unpin(self.store, self.manifests[name].entry_key)
            self.pinned.discard(name)
        elif name in self.signers:
            pins.pin(self.store, self.ref(name))
            self.pinned.add(name)

    @rule(grace=st.sampled_from((0.0, None)))
    def collect_orphans(self, grace: float | None) -> None:
        collect(self.store, Limits(), now=time.time() + 1, grace_s=grace)

    @precondition(lambda self: not self.broken)
    @rule(limits=st.sampled_from((Limits(max_bytes=1), Limits(max_age_s=10.0))))
    def collect_all(self, limits: Limits) -> None:
        """Everything is too much or too old; pins hold."""
        collect(self.store, limits, now=time.time() + 10**6, grace_s=0.0)
        self.signers = {name: who for name, who in self.signers.items() if name in self.pinned}

    @precondition(lambda self: not self.broken)
    @rule(name=names)
    def remove(self, name: str) -> None:
        if name in self.signers:
            collect(self.store, Limits(), now=time.time() + 1, asked=[self.ref(name)], force=True)
            self.signers.pop(name)
            self.pinned.discard(name)  # a pin goes with the entry that it kept

    # Transport

    @rule()
    def copy(self) -> None:
        """``cp -r``, and go on with the copy."""
        self.copies += 1
        there = self.folder / f"store {self.copies}"
        shutil.copytree(self.store.root, there)
        shutil.rmtree(self.store.root)
        self.store = Store.open(there)

    @rule(name=names)
    def export_and_import(self, name: str) -> None:
        archive = io.BytesIO()
        try:
            export_stream(self.store, [self.ref(name)], archive)
        except StoreError:
            assert not self.is_whole(name)
            return
        assert self.is_whole(name)
        self.copies += 1
        other = Store.create(self.folder / f"other {self.copies}")
        for store, new in ((other, True), (other, False), (self.store, False)):
            archive.seek(0)
            (done,) = import_stream(store, archive, where="archive")
            assert (done.new, done.same) == (new, True)
        ref = self.ref(name, other)
        assert other.read_manifest(ref) == self.manifests[name]
        assert set(signing.names(ref.path)) == self.signers[name]
        for digest in self.manifests[name].blobs:
            other.read_blob(digest)

    # What holds after every step

    @invariant()
    def the_store_is_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        present = {ref.entry_key: ref for ref in self.store.entries()}
        assert set(present) == {self.manifests[name].entry_key for name in self.signers}
        for name, signers in self.signers.items():
            ref, manifest = self.ref(name), self.manifests[name]
            assert set(signing.names(ref.path)) == signers
            try:
                assert self.store.read_manifest(ref) == manifest
                read = self.store.reader(manifest)
                assert [len(read(digest)) for digest in manifest.blobs] == list(manifest.blobs.values())
                whole = True
            except CorruptEntry:
                whole = False
            assert whole is self.is_whole(name), name
            if name not in self.broken:
                states = signing.states(ref, self.store.read_manifest_bytes(ref), {})
                assert all(state.valid for state in states)


StoreMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestStore = StoreMachine.TestCase
