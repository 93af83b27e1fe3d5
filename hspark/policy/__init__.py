"""Chain choice, acceptance estimates, and the shared verification budget: the paper's decisions, without an engine.

Nothing here knows of models, caches or tokenizers. A step of any engine reads, on the device:

    free = Chain.build(tokens, length, estimator(match_length, agreement, copy_length), source=SOURCE_FREE)
    chain = choose(model, free, price)                          # choose = policy("proposed")
    kept = allocate(chain.survival, chain.length, budget)       # slots of each row that are verified

and on the host, one or two steps behind:

    budget, price, *_ = choose_budget(survival, requests, cost, context_tokens)
"""

from hspark.core import SOURCE_FREE, SOURCE_MODEL, SOURCE_TARGET, Chain
from hspark.policy.allocation import allocate
from hspark.policy.base import (
    ChainPolicy,
    LossyCombinationError,
    Policy,
    lossy_reason,
    policy,
    policy_names,
    refuse_if_lossy,
    register,
)
from hspark.policy.budget import BudgetDecision, SurvivalHistory, choose_budget, evaluate_budget
from hspark.policy.cost import CostModel, LinearCost, StepCostTable, load_cost, profile_cost
from hspark.policy.estimator import AcceptanceEstimator, Coefficients
from hspark.policy.fitting import GradedSteps, calibration_error, expected_calibration_error, log_loss_per_step
from hspark.policy.selection import chain_value, choose_chain, is_prefix

__all__ = [
    "SOURCE_FREE",
    "SOURCE_MODEL",
    "SOURCE_TARGET",
    "AcceptanceEstimator",
    "BudgetDecision",
    "Chain",
    "ChainPolicy",
    "Coefficients",
    "CostModel",
    "GradedSteps",
    "LinearCost",
    "LossyCombinationError",
    "Policy",
    "StepCostTable",
    "SurvivalHistory",
    "allocate",
    "calibration_error",
    "chain_value",
    "choose_budget",
    "choose_chain",
    "evaluate_budget",
    "expected_calibration_error",
    "is_prefix",
    "load_cost",
    "log_loss_per_step",
    "lossy_reason",
    "policy",
    "policy_names",
    "profile_cost",
    "refuse_if_lossy",
    "register",
]
