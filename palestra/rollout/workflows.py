"""The workflow that a spec names."""

from palestra.rollout.single_turn import single_turn
from palestra.rollout.start import Workflow
from palestra.spec.imports import load_function
from palestra.spec.kinds.posttrain import MultiTurnSpec, ToolsSpec, WorkflowSpec


def make_workflow(spec: WorkflowSpec) -> Workflow:
    """From a problem to judged trajectories, as the spec asks for it."""
    if spec.name == "custom":
        return load_function(spec.function, "rollout.workflow.function")
    if isinstance(spec, MultiTurnSpec):
        from palestra.rollout.multi_turn import multi_turn

        return multi_turn(spec)
    if isinstance(spec, ToolsSpec):
        from palestra.rollout.tools import tools

        return tools(spec)
    return single_turn
