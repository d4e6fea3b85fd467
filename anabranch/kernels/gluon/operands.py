"""Values of the Hopper kernels that travel together."""

from typing import Any, NamedTuple


class HopperOperands(NamedTuple):
    """What a launch was given, but for its boxes."""

    table: Any  # [num_seqs, max_pages] or None
    table_stride: Any
    rules: Any  # Rules, with the scale of logits in base 2 and a mask of bytes
    tree_width: Any
    results: Any  # StateRows
    order: Any  # as order.py lays it out; of latent keys, as schedule.py does


class Ring(NamedTuple):
    """Tiles of keys or values in shared memory: two ranges of columns, and who fills them."""

    main: Any
    rest: Any
    full: Any  # barriers


class BoxedColumns(NamedTuple):
    """Boxes of keys or values, and where a page and a head begin in them."""

    main: Any
    rest: Any  # or None
    page_rows: Any
    head_stride: Any


class QueryRoom(NamedTuple):
    """The rows of each consumer in shared memory."""

    main: Any
    rest: Any
    full: Any  # barriers
    empty: Any


class Staging(NamedTuple):
    """Rows on their way out of shared memory, and the boxes that they go to."""

    main: Any
    rest: Any
    main_desc: Any
    rest_desc: Any


class FullTiles(NamedTuple):
    """The tiles [start, stop) whose keys all rows of an item see."""

    start: Any
    stop: Any


class Sight(NamedTuple):
    """What decides which keys the rows of an item see."""

    tokens: Any
    tree_rows: Any  # pointers or None
    tree_width: Any
    block: Any  # with q_len and seq_len


class Running(NamedTuple):
    """A running state, and the weights of the tile before on their way to its values."""

    acc: Any  # (main, rest)
    carried: Any
    total: Any
    peak: Any


class EndedRows(NamedTuple):
    """Where the rows of an item that has ended belong, and which part of their block they are."""

    block: Any
    kv_head: Any  # or the pack of heads
    part: Any
    num_parts: Any
    first_slot: Any
    half: Any  # of the columns, over latent keys


class LatentRoom(NamedTuple):
    """Shared memory of the kernel for latent keys."""

    q: Any  # left and right columns of the queries
    q_full: Any  # barrier
    k: Any  # left, right and rotary columns of both halves of a tile
    k_full: Any  # barriers of left columns, and of the others
    p_even: Any  # weights that the consumers exchange,
    p_odd: Any
    peak_even: Any  # with the peaks of their rows
    peak_odd: Any
    sums: Any  # of both consumers


class LatentBoxes(NamedTuple):
    """Boxes of queries and latent rows, and the rows from one page to the next."""

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    page_rows: Any
