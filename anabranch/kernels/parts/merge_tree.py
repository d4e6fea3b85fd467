"""Parts of a block, left by several workers, merged without a second launch and without waiting.

Parts are the leaves of a tree with fan_in children a node. The worker that arrives last at a node
merges its children, in order of their keys, into the first child's slot and goes on to the node
above; so the result does not depend on the order of arrival. A level costs an arrival (about 2 us
on an H200), so nodes are wide, and the parts of a node are loaded many at a time.
"""

import triton
import triton.language as tl

from anabranch.kernels.parts.join import arrive, merge_node


@triton.jit
def merge_tree(item, results, C: tl.constexpr):
    """Climb from the item's part while this worker is the last to arrive; at the top, write."""
    num_parts = item.num_parts
    node = item.part  # the first part below the node reached
    span = 1  # parts below a child
    while span < num_parts:
        node = node // (span * C.merging.fan_in) * (span * C.merging.fan_in)
        children = tl.minimum(tl.cdiv(num_parts - node, span), C.merging.fan_in)
        climbs = children == 1
        if children > 1:
            # node + span tells a node from all others: fan_in divides it as often as it does span
            climbs = arrive(node + span, 1, children, item, results.parts, C)
            if climbs:
                is_top = span * C.merging.fan_in >= num_parts
                merge_node(node, span, children, is_top, item, results, C)
        span = tl.where(climbs, span * C.merging.fan_in, num_parts)
