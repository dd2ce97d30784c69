"""Every spec under examples/, as one would ask for it, with values for the variables that it leaves open."""

from pathlib import Path

from palestra.spec.source import read_file

ROOT = Path(__file__).parent.parent
FILES = sorted(path for path in ROOT.glob("examples/**/*") if path.suffix in (".yaml", ".yml", ".json"))
VARIABLES = {
    "classic.yaml:any": {"env": "MountainCarContinuous-v0", "frames": "1e5"},
    **{f"mujoco.yaml:{name}": {"env": "Hopper-v5", "frames": "1e5"} for name in ("ppo", "sac", "crossq")},
    "atari.yaml:ppo": {"env": "ALE/Pong-v5", "lam": "0.95", "frames": "1e5"},
    "atari.yaml:a2c": {"env": "ALE/Pong-v5", "frames": "1e5"},
    "shakespeare.yaml": {"text": "text.txt"},
}


def specs_of(path: Path) -> dict[str, dict[str, str]]:
    """The specs of a file: what to load, and the variables to load it with."""
    data = read_file(path).data
    named = "kind" not in data and "extends" not in data
    sources = [f"{path}:{name}" for name in data if not name.startswith("_")] if named else [str(path)]
    return {source: VARIABLES.get(Path(source).name, {}) for source in sources}
