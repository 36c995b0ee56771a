"""Who computes how many tokens in the next step."""

from palmette.runtime.scheduler.scheduler import Plan, PlannedWork, Scheduler

__all__ = ["Plan", "PlannedWork", "Scheduler"]
