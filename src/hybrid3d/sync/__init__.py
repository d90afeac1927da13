"""Sync of weights from the train layout to the rollout layout: plan, session, sharing and verification."""

from hybrid3d.sync.adapters import policy_sync
from hybrid3d.sync.session import SyncReport, WeightSync
from hybrid3d.sync.verification import CorruptSync

__all__ = ["CorruptSync", "SyncReport", "WeightSync", "policy_sync"]
