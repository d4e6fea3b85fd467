"""What differs between the versions of Triton that this package supports.

Kernels and launchers take it from here (Gluon's names from `gluon/versions.py`, what 3.9 makes of
products on Hopper from `launches/hopper_ptx.py`), so that a new version is a new line of a table.
CONTRIBUTING.md says what to run for one.
"""

from anabranch.launches.hopper_ptx import (
    WHOLE_DESCRIPTORS,
    WHOLE_DESCRIPTORS_NO_COPIES,
)
from anabranch.launches.triton_version import since

# Whether the compiler takes products with 8 columns of operands made in registers, as codes loaded
# by pairs of keys are, on GPUs with tensor memory. From 3.8 on, TritonGPUOptimizeDotOperands fails.
PAIRS_IN_TENSOR_MEMORY = since({(3, 6): True, (3, 8): False})

# Whether Hopper multiplies by 8 columns in single warps, which take four dims next to each other
# from a thread. From 3.8 on it does in warpgroups, as by 16 columns: in the order of single warps
# keys would go through shared memory once more (556 and not 454 instructions a tile of int8).
NARROW_IN_WARPS = since({(3, 6): True, (3, 8): False})

# How many columns of queries Hopper's prompts keep in registers: of up to 128, of those where
# blocks may be cut, and of 256. 3.9 copies operands in registers before each product; with all
# queries these are more than a thread has: 756 and 854 instructions a tile of 128 keys and dims in
# the two consumers, 8 of them to local memory, against 728 in 3.6. Half of the queries leave 739
# with the assembler that `gluon/versions.py` names. H200, us, with none, half and all in registers:
# 1 x 8192 889, 875 and 934 (3.6: 870), 4 x 4096 985, 975 and 1028 (969); heads of 256, 1 x 4096 425
# and, with half, 420 (414). Blocks that may be cut: a chunk of 512 at 32768 434, 449 and 453 (427),
# 1 x 1024 25.9, 27.0 and 26.8 (26.0).
QUERY_COLUMNS = since({(3, 6): 128, (3, 9): 0})
CUT_QUERY_COLUMNS = since({(3, 6): 128, (3, 9): 0})
WIDE_QUERY_COLUMNS = since({(3, 6): 0, (3, 9): 128})

# Rows of a tile of few queries over codes that are not loaded by pairs, such as Q8_0. 8 leave half
# of the softmax's work and room for a fourth worker, but need products of 8 columns, which 3.6 and
# 3.7 multiply in single warps, and none on GPUs with tensor memory (see above): for Q8_0 488
# instructions a tile with 3.9, against 557 of 16 rows. H200, us, 64 x 4096: 152 against 180 (3.6:
# 168).
CODE_ROWS = since({(3, 6): 16, (3, 9): 8})

# How products on Hopper are compiled: in decodes, over codes, in prompts with whole blocks, in
# those that may be cut, and over latent rows.
DECODE_OPTIONS = since({(3, 6): {}, (3, 9): WHOLE_DESCRIPTORS})
CODE_OPTIONS = since({(3, 6): {}, (3, 9): {}})
PROMPT_OPTIONS = since({(3, 6): {}, (3, 9): WHOLE_DESCRIPTORS_NO_COPIES})
CUT_OPTIONS = since({(3, 6): {}, (3, 9): WHOLE_DESCRIPTORS})
LATENT_OPTIONS = since({(3, 6): {}, (3, 9): WHOLE_DESCRIPTORS_NO_COPIES})
