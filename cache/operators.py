"""Artifact: a sealed kernel for an operation that runs outside every piece, as a manifest names it.

``pwcc::attention`` is not part of any compiled piece, but on a GPU its decode form is one kernel that an
entry can carry: a sealed piece of its own, with the facts of the tensors it was made for.
"""

from __future__ import annotations

from dataclasses import dataclass

from pwcc.cache.ids import BlobDigest
from pwcc.cache.sealed_kernels import as_identifier
from pwcc.cache.strict import Fields, Json

MAX_HEADS = 65_536
MAX_HEAD_DIM = 1_024


@dataclass(frozen=True, order=True)
class DecodeAttention:
    """Attention of one new token per sequence over a paged cache, for one form of query, key and value.

    ``dtype`` is torch's name of all of them; ``sinks`` the dtype of the sink logits, None without; ``window``
    and ``softcap`` tell whether the kernel takes one.
    """

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    window: bool
    softcap: bool
    sinks: str | None
    piece: BlobDigest

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "dtype": self.dtype,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "piece": self.piece,
        }

    @classmethod
    def parse(cls, value: object, where: str) -> DecodeAttention:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        found = cls(
            dtype=fields.item("dtype", as_identifier),
            heads=fields.int_("heads", low=1, high=MAX_HEADS),
            kv_heads=fields.int_("kv_heads", low=1, high=MAX_HEADS),
            head_dim=fields.int_("head_dim", low=1, high=MAX_HEAD_DIM),
            window=fields.bool_("window"),
            softcap=fields.bool_("softcap"),
            sinks=fields.opt_item("sinks", as_identifier),
            piece=fields.digest("piece"),
        )
        fields.done()
        return found
