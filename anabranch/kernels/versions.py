"""What differs between the versions of Triton that this package supports.

Kernels and launchers take it from here (Gluon's names from `gluon/versions.py`, what 3.9 makes of
products on Hopper from `launches/hopper_ptx.py`), so that a new version is a new line of a table.
CONTRIBUTING.md says what to run for one.
"""

from anabranch.launches.hopper_ptx import AS_WRITTEN, NO_COPIES, WHOLE_DESCRIPTORS
from anabranch.launches.triton_version import since

# Whether the compiler takes products with 8 columns of operands made in registers, as codes loaded
# by pairs of keys are, on GPUs with tensor memory. From 3.8 on, TritonGPUOptimizeDotOperands fails.
PAIRS_IN_TENSOR_MEMORY = since({(3, 6): True, (3, 8): False})

# Whether Hopper multiplies by 8 columns in single warps, which take four dims next to each other
# from a thread. From 3.8 on it does in warpgroups, as by 16 columns: in the order of single warps
# keys would go through shared memory once more (556 and not 454 instructions a tile of int8).
NARROW_IN_WARPS = since({(3, 6): True, (3, 8): False})

# How many columns of queries Hopper's prompts keep in registers: of 128, of those where blocks may
# be cut, and of 256. Heads of 64 keep all. With queries in registers, ptxas 13 computes the
# maxima of one row while it should compute weights of the other, and a tile waits 1000 cycles for
# its weights and not 815 (docs/hopper.md): 1 x 8192 takes 874 us with none and 940 with half (3.6:
# 877 with all).
QUERY_COLUMNS = since({(3, 6): 128, (3, 9): 0})
CUT_QUERY_COLUMNS = since({(3, 6): 128, (3, 9): 0})
WIDE_QUERY_COLUMNS = since({(3, 6): 0, (3, 9): 128})

# Rows of a tile of few queries over codes that are not loaded by pairs, such as Q8_0. 8 leave half
# of the softmax's work and room for a fourth worker, but need products of 8 columns, which 3.6 and
# 3.7 multiply in single warps, and none on GPUs with tensor memory (see above): for Q8_0 488
# instructions a tile with 3.9, against 557 of 16 rows. H200, us, 64 x 4096: 152 against 180 (3.6:
# 168).
CODE_ROWS = since({(3, 6): 16, (3, 9): 8})

# What 3.9 leaves of products on Hopper: in decodes, in decodes over codes, in prompts with whole
# blocks, in those where blocks may be cut, and over latent rows (launches/hopper_ptx.py). H200, the
# speed of 3.9 over that of 3.6, as written, with whole descriptors, and without copies too: prompts
# of 1 x 8192 0.965, 0.972, 1.003; a chunk of 512 at 32768 0.989, 0.991, 0.958; decodes of fp8
# 0.995, 1.004, 0.957, of 1 x 8192 1.012 and 1.017; latent 1 x 8192 1.032 and, without, 1.052.
DECODE_OPTIONS = since({(3, 6): {}, (3, 9): WHOLE_DESCRIPTORS})
CODE_OPTIONS: dict[str, str] = {}
PROMPT_OPTIONS = since({(3, 6): {}, (3, 9): NO_COPIES})
CUT_OPTIONS = since({(3, 6): {}, (3, 9): WHOLE_DESCRIPTORS})
LATENT_OPTIONS = since({(3, 6): {}, (3, 9): NO_COPIES})

# Of products with int4 weights: with the limit of registers, 56 bytes of a thread go to local
# memory where four consumers share a tile, without it 24, outside of the loop.
CODE_TILE_OPTIONS = since({(3, 6): {}, (3, 9): AS_WRITTEN})
