"""Lists of selected keys, over another source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch

from anabranch.keys.columns import DecodedColumns, KeyColumns, last_positions
from anabranch.keys.common_strides import common_steps, in_steps
from anabranch.keys.dense import DenseKV
from anabranch.keys.formats import rows_of
from anabranch.keys.latent import LatentKV
from anabranch.keys.paged import PagedKV
from anabranch.keys.source import Identity, KeyLengths, KeySource, check_index
from anabranch.keys.view import KeyLists, KeyView
from anabranch.shapes import Sizes, check_device, check_dtype, read_index

# Sources that lists can name keys of: those whose view has [pages, keys, heads, dims].
BASES: dict[str, type[KeySource]] = {source.kind: source for source in (DenseKV, PagedKV, LatentKV)}


@dataclass(frozen=True, slots=True)
class SelectedKV(KeySource):
    """For each query token its own lists of keys; a token attends to what its lists name.

    indices       [num_tokens, num_lists, width]: places in the token's sequence, from 0. List j is
                  that of query heads [j * n, (j + 1) * n) with n = num_heads / num_lists, so a
                  token has a list for each query head, for each kv head, or for something between.
                  [num_tokens, width]: one list, shared by all heads
    counts        [num_tokens, num_lists] or [num_tokens]: how much of a list is used; 0 for none
    log_weights   as `indices`, added to the logits of the listed keys
    seqs          [num_tokens]: the sequence of `keys` that a token belongs to. Without it every
                  sequence has equally many tokens, one after the other: with num_tokens = num_seqs
                  each has one

    A list is all that its heads see: no causal rule is applied to it, and no window.
    """

    kind: ClassVar[str] = "selected"
    keys: KeySource
    indices: torch.Tensor  # int32
    counts: torch.Tensor  # int32
    log_weights: torch.Tensor | None = None  # float32
    seqs: torch.Tensor | None = None  # int32
    identity: Identity | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        listed = getattr(self.keys, "identity", None)
        if listed is None:
            self.check()
        else:
            own = (self.indices, self.counts, self.log_weights, self.seqs)
            self.identify((*listed.tensors, *own), listed.kind)

    def check(self) -> None:
        """Lists, and the source whose keys they name."""
        if type(self.keys) not in BASES.values():
            names = " or ".join(source.__name__ for source in BASES.values())
            raise ValueError(f"keys must be {names}, got {type(self.keys).__name__}")
        pattern = "num_tokens width" if self.indices.dim() == 2 else "num_tokens num_lists width"
        sizes, device = Sizes(), self.keys.device
        sizes.match("indices", self.indices, pattern)
        check_index("indices", self.indices, device)
        sizes.match("counts", self.counts, pattern.removesuffix(" width"))
        check_index("counts", self.counts, device)
        if self.log_weights is not None:
            sizes.match("log_weights", self.log_weights, pattern)
            check_dtype("log_weights", self.log_weights, (torch.float32,))
            check_device("log_weights", self.log_weights, device)
        if self.seqs is not None:
            sizes.match("seqs", self.seqs, "num_tokens")
            check_index("seqs", self.seqs, device)
        self._check_sizes()

    def _check_sizes(self) -> None:
        num_lists, num_kv_heads = self.lists_per_token, self.keys.num_kv_heads
        if self.indices.dim() == 3 and (not num_lists or num_lists % max(num_kv_heads, 1)):
            raise ValueError(
                f"indices have {num_lists} lists a token, not a multiple of the "
                f"{num_kv_heads} kv heads; lists shared by all heads are [num_tokens, width]"
            )
        num_tokens, num_seqs = self.indices.shape[0], self.keys.num_seqs
        if self.seqs is None and (num_tokens % max(num_seqs, 1) or num_tokens < num_seqs):
            raise ValueError(
                f"indices are of {num_tokens} tokens, not a multiple of the {num_seqs} sequences; "
                "other numbers of tokens need seqs"
            )

    @property
    def lists_per_token(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """1 where a list is shared by all heads."""
        return self.indices.shape[1] if self.indices.dim() == 3 else 1

    @property
    def num_seqs(self) -> int:
        """Every list is a sequence."""
        return self.indices.shape[0] * self.lists_per_token

    @property
    def num_kv_heads(self) -> int:
        """Those that read one list."""
        return 1 if self.indices.dim() == 3 else self.keys.num_kv_heads

    @property
    def head_dim_k(self) -> int:
        return self.keys.head_dim_k

    @property
    def head_dim_v(self) -> int:
        return self.keys.head_dim_v

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        """Where keys, values and lists lie."""
        return self.keys.device

    @property
    def capacity(self) -> int:
        """The width of a list."""
        return self.indices.shape[-1]

    @property
    def lengths(self) -> KeyLengths:
        """How much of each list is used."""
        return KeyLengths(seq_lens=self.counts.reshape(-1))

    @property
    def tokens_per_seq(self) -> int:
        """Where `seqs` does not say it."""
        return max(self.indices.shape[0] // max(self.keys.num_seqs, 1), 1)

    def view(self) -> KeyView:
        """Pages of one key, in whatever strides all keys of the other source have in common."""
        view, num_kv_heads = self.keys.view(), 1
        num_pages, page_size, *_ = view.k.ptr.shape
        if self.indices.dim() == 3:
            num_kv_heads = self.keys.num_kv_heads
        # Scales may have another order of keys and heads than codes: one number finds a key only
        finds_heads = num_kv_heads > 1 and view.k.scales is None and view.v.scales is None
        sizes = (num_pages, page_size, num_kv_heads if finds_heads else 1)
        lists = KeyLists(
            self.indices.reshape(self.num_seqs, self.capacity),
            self.counts.reshape(-1),
            self.seqs,
            self.tokens_per_seq,
            self.lists_per_token,
            num_kv_heads,
            view.page_table,
            view.page_size,
            *common_steps(sizes, view.k, view.v),
        )
        k, v = (in_steps(store, sizes, finds_heads) for store in (view.k, view.v))
        weights = self.log_weights
        if weights is not None:
            weights = weights.reshape(lists.indices.shape).contiguous()
        return KeyView(k, v, None, 1, view.values_in_keys, lists, weights)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the other source, then what makes the lists."""
        own = {"indices": self.indices, "counts": self.counts}
        for name, given in (("log_weights", self.log_weights), ("seqs", self.seqs)):
            own |= {} if given is None else {name: given}
        return self.keys.tensors() | {f"selected.{name}": tensor for name, tensor in own.items()}

    def static(self) -> list[int]:
        """The other source's place in BASES, its number of tensors, and which options are given."""
        given = [self.log_weights is not None, self.seqs is not None]
        base = [[*BASES].index(self.keys.kind), len(self.keys.tensors())]
        return [*base, *map(int, given), *self.keys.static()]

    @classmethod
    def rebuild(cls, tensors: list[torch.Tensor], static: list[int]) -> Self:
        """The source again, from `tensors()` and `static()`."""
        kind, num_tensors, weighted, by_seqs, *rest = static
        base = [*BASES.values()][kind].rebuild(tensors[:num_tensors], rest)
        indices, counts, *options = tensors[num_tensors:]
        weights = options.pop(0) if weighted else None
        return cls(base, indices, counts, weights, options.pop(0) if by_seqs else None)

    def gather(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values of one list."""
        token, place = divmod(seq, self.lists_per_token)
        count = int(self.counts.reshape(-1)[seq])
        listed = self.indices.reshape(self.num_seqs, -1)[seq, :count].long()
        owner = token // self.tokens_per_seq if self.seqs is None else int(self.seqs[token])
        k, v = self.keys.gather(owner)
        head = place * self.keys.num_kv_heads // self.lists_per_token
        heads = slice(None) if self.indices.dim() == 2 else slice(head, head + 1)
        return k[listed, heads], v[listed, heads]

    def columns(
        self, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
    ) -> KeyColumns:
        rows, places = torch.tensor(seqs), last_positions(lens, k_len, starts)
        listed = self.indices.reshape(self.num_seqs, -1)[rows].gather(1, places)
        tokens, view = rows // self.lists_per_token, self.keys.view()
        owners = tokens // self.tokens_per_seq if self.seqs is None else self.seqs[tokens].long()
        pages, inner = owners[:, None].expand_as(listed), listed
        if view.page_table is not None:
            pages = view.page_table[owners[:, None], listed // view.page_size]
            inner = listed % view.page_size
        heads = None
        if self.indices.dim() == 3:
            heads = rows % self.lists_per_token * self.keys.num_kv_heads // self.lists_per_token
        k, v = rows_of(view.k), None if view.values_in_keys else rows_of(view.v)
        return DecodedColumns(k, v, self.head_dim_v, pages, inner, self.dtype, heads)

    def column_weights(
        self, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The log-weights of the listed keys."""
        if self.log_weights is None:
            return None
        weights = self.log_weights.reshape(self.num_seqs, -1)[torch.tensor(seqs)]
        return weights.gather(1, last_positions(lens, k_len, starts))

    def check_content(self) -> None:
        """Validate the other source, the lists and whose they are. Synchronises."""
        self.keys.check_content()
        lens, num_lists = self.keys.key_lens(), self.lists_per_token
        num_tokens = self.indices.shape[0]
        owners = [token // self.tokens_per_seq for token in range(num_tokens)]
        if self.seqs is not None:
            owners = read_index(self.seqs)
        counts = read_index(self.counts.reshape(-1))
        lists = self.indices.reshape(self.num_seqs, -1).cpu()
        for token, owner in enumerate(owners):
            if not 0 <= owner < len(lens):
                raise ValueError(f"token {token} is of sequence {owner}, there are {len(lens)}")
            for place in range(num_lists):
                row = token * num_lists + place
                name = f"sequence {owner}, token {token}"
                name += f", list {place}" if self.indices.dim() == 3 else ""
                check_list(name, read_index(lists[row]), counts[row], lens[owner])


def check_list(name: str, listed: list[int], count: int, length: int) -> None:
    """Refuse a list of keys that runs over its room, or names a key twice or one that is not."""
    if not 0 <= count <= len(listed):
        raise ValueError(f"{name} has count {count}, its list holds 0 to {len(listed)}")
    first: dict[int, int] = {}
    for place, key in enumerate(listed[:count]):
        if not 0 <= key < length:
            raise ValueError(f"{name}, place {place} names key {key}, the sequence has {length}")
        if key in first:
            raise ValueError(f"{name}, places {first[key]} and {place} both name key {key}")
        first[key] = place
