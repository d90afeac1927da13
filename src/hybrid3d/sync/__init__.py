"""Sync of weights from the train layout to the rollout layout, as `hybrid3d.reshard` plans it."""

from hybrid3d.sync.compose import policy_sync, weight_sync
from hybrid3d.sync.delta import SyncSettings
from hybrid3d.sync.session import CorruptSync, Sync, SyncReport, WeightSync

__all__ = ["CorruptSync", "Sync", "SyncReport", "SyncSettings", "WeightSync", "policy_sync", "weight_sync"]
