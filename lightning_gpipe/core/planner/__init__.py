"""Chooses stages, balance, schedule and micro-batches by predicting their time and memory.

Only ``balance="auto"`` and the plan command need it.
"""

from lightning_gpipe.core.planner.no_plan import NoPlan
from lightning_gpipe.core.planner.planner import Plan, plan_for
from lightning_gpipe.core.planner.predicted_stage import StagePrediction
from lightning_gpipe.core.planner.prediction import Prediction
