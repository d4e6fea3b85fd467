"""Attention over keys that lie on several ranks: dealt pages, local states, one exact merge."""

from anabranch.distributed.attend_across import attend_across
from anabranch.distributed.dealt_kv import DealtKV, deal_table
from anabranch.distributed.merge_across import merge_across
from anabranch.distributed.plan_across import AcrossPlan, plan_across

__all__ = ["AcrossPlan", "DealtKV", "attend_across", "deal_table", "merge_across", "plan_across"]
