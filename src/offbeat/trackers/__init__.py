"""Trackers: where a run is shown while it goes. What is written into the run folder is complete without them.

tracker     the seam, `Tracker`, and its values          delivery    a thread for each: the run never waits
state       trackers.json, for a resume                  opening     from `[[trackers]]` to trackers that run

tensorboard  wandb  trackio  mlflow  own                 one file a backend, imported when it is named
"""

from offbeat.trackers.opening import Trackers, require_trackers, tracking
from offbeat.trackers.tracker import Metrics, Opened, Outcome, Row, TrackedRun, Tracker

__all__ = [
    "Metrics",
    "Opened",
    "Outcome",
    "Row",
    "TrackedRun",
    "Tracker",
    "Trackers",
    "require_trackers",
    "tracking",
]
