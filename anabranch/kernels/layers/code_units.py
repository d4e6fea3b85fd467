"""How programs share the products of all tiles: as many units each, whole tiles or not.

A unit is a run of columns of a tile. They lie tile after tile, those of the same outputs together.
Where programs meet within a tile, each leaves sums of its own.
"""

import triton
import triton.language as tl


@triton.jit
def own_units(program, num_programs, m, n, k, C: tl.constexpr):
    """What a program has: its first unit and the end; the tile of outputs, the tile of rows and the
    run of the first; then how many units, runs of a tile and tiles of rows there are.

    Found before warps part: divisions take more registers than the producer has.
    """
    row_tiles = (m + C.rows - 1) // C.rows
    num_runs = (k + C.format.run - 1) // C.format.run
    num_units = (n + C.outputs - 1) // C.outputs * row_tiles * num_runs
    begin = program * num_units // num_programs
    end = (program + 1) * num_units // num_programs
    tile = begin // num_runs
    place = tile // row_tiles, tile % row_tiles, begin % num_runs
    return begin, end, place[0], place[1], place[2], num_units, num_runs, row_tiles


@triton.jit
def next_tile(output_tile, row_tile, row_tiles):
    """The tile after one."""
    last = row_tile + 1 == row_tiles
    return tl.where(last, output_tile + 1, output_tile), tl.where(last, 0, row_tile + 1)


@triton.jit
def owners(first_unit, num_runs, num_units, num_programs):
    """The first and the last program of a tile."""
    last_unit = first_unit + num_runs - 1
    first = ((first_unit + 1) * num_programs - 1) // num_units
    return first, ((last_unit + 1) * num_programs - 1) // num_units


@triton.jit
def place_of(program, first):
    """Where a program leaves sums of a tile whose first program is given.

    It has at most two tiles with others: the one it begins within, and the one it ends within.
    """
    return program * 2 + (program == first).to(tl.int32)
