"""The one base class of everything a spec holds: unknown keys are errors, values are never coerced, nothing changes."""

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """A mapping in a spec. The docstring under each field is its documentation."""

    model_config = ConfigDict(
        defer_build=True,  # most kinds are not used by most processes
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
