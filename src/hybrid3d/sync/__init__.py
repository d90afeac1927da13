"""Sync of weights from the train layout to the rollout layout: plan, session, what it consists of, and verification."""

from hybrid3d.sync.compose import policy_sync, weight_sync
from hybrid3d.sync.session import Sync, SyncReport, WeightSync
from hybrid3d.sync.settings import SyncSettings
from hybrid3d.sync.verification import CorruptSync

__all__ = ["CorruptSync", "Sync", "SyncReport", "SyncSettings", "WeightSync", "policy_sync", "weight_sync"]
