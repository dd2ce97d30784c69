"""Code out of completions, and what tests need of code."""

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.tasks.sets.code import inspect_tests
from palestra.tasks.verify.code import complete_code, defines, extract_code, parse

MAIN = "def f(x):\n    return helper(x)\n"
HELPER = "def helper(x):\n    return x + 1\n"
CODE = MAIN + "\n" + HELPER


def value(code: str | None, call: str = "f(1)") -> object:
    assert code is not None
    names: dict[str, object] = {}
    exec(code, names)
    return eval(call, names)


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        f"\n\n{CODE}\n\n",
        f"```python\n{CODE}```",
        f"```\n{CODE}```\n",
        f"Here is the function:\n\n```python\n{CODE}```\n\nIt adds one.",
        f"```py\n{CODE}\n```\nUse it:\n```python\nprint(f(3))\n```\n",
        f"First try:\n```python\ndef f(x): return 0\n```\nBetter:\n```python\n{CODE}```",
        f"Output:\n```\n[1, 2]\n```\n```Python3\n{CODE}```\n```text\nsome words\n```",
        f"```python\n{CODE}",
        f"{CODE}```\n\nThis is it.",
        f"{CODE}[DONE]\n\nYou are an expert Python programmer\ndef f(x): return 0",
        f"[BEGIN]\n{CODE}[DONE]",
        f"Sure!\n[BEGIN]\n```python\n{CODE}```\n[DONE]",
        f"Here it is:\n{CODE}",
        f"from what you say, this follows.\n{CODE}",
        f"{CODE}\nThis function adds one to its argument, and that is all.",
        f"1. So:\n\n   ```python\n{textwrap.indent(CODE, '   ')}   ```\n",
        f"~~~python\n{CODE}~~~",
        f"````python\n{CODE}````",
        f"```python\n{CODE}\ndef unfinished(x",
        CODE.replace("\n", "\r\n"),
        f"```json\n{{}}\n```\n```python\n{CODE}```",
    ],
)
def test_code_is_in_a_text_it_is_found_whole(text: str):
    code = extract_code(text, ["f"])
    assert value(code) == 2
    assert value(code, "helper(2)") == 3  # what follows the main function is not cut off


@pytest.mark.parametrize(
    "text",
    [
        *("", "  \n", "I do not know.", "yes", "42", "```python\n```", "```python\nthis is no code\n```"),
        *("[BEGIN][DONE]", "```cpp\nint f(int x) { return x; }\n```", "def f(x", "x y z " * 100, "(" * 10000, "\0"),
    ],
)
def test_text_without_code_gives_none(text: str):
    assert extract_code(text, ["f"]) is None


def test_no_block_has_the_entry_point_the_last_that_defines_something_counts():
    text = "```python\ndef g(): pass\n```\n```python\ndef h(): pass\n```\n```\n[1]\n```"
    assert extract_code(text, ["f"]) == "def h(): pass\n"


def test_lambda_and_import_bind_the_entry_point():
    assert value(extract_code("f = lambda x: x + 1", ["f"])) == 2
    assert defines("from operator import neg as f", ["f"])
    assert defines("f, g = 1, 2", ["f", "g"])
    assert not defines("def g():\n    f = 1", ["f"])


@given(st.text(alphabet="def f(x):\n `[]BEGINDOE~#'\"\\", max_size=200))
def test_any_text_gives_code_that_parses_or_none(text: str):
    code = extract_code(text, ["f"])
    assert code is None or parse(code) is not None


@given(st.text(max_size=300), st.integers(0, 3))
def test_code_among_any_text_in_a_fence_is_found(text: str, before: int):
    words = text.replace("`", "").replace("~", "").replace("[", "")
    assert extract_code(f"{words * before}\n```python\n{CODE}```\n{words}", ["f"]) == CODE


def test_very_long_text_takes_no_time():
    for text in ("```\n" * 40000, "def f(x):\n" * 20000, "(" * 199_000, "f = [\n" * 30000, "a\n" * 90000 + "def f(x)"):
        code = extract_code(text, ["f"])
        assert code is None or parse(code) is not None


PROMPT = (
    'import math\n\n\ndef base(x):\n    return x * 10\n\n\ndef f(x):\n    """ Add one.\n    >>> f(1)\n    2\n    """\n'
)


@pytest.mark.parametrize(
    "text",
    [
        "    return x + 1\n",
        "    y = x\n    return y + 1",
        "    return x + 1\n\n\ndef helper():\n    pass\n",
        "    return helper(x)\n\n\ndef helper(x):\n    return x + 1\n",
        "    return x + 1\n```\n\nThat is all.",
        "    return x + 1\n\nThis adds one.",
        "def f(x):\n    return x + 1\n",
        "\ndef f(x):\n    return x + 1\n",
        "```python\ndef f(x):\n    return x + 1\n```",
        f"Here it is:\n```python\nimport math\n\n{CODE}```\nDone.",
        "```python\n    return x + 1\n```",
        "```python\ndef f(x):\n    return 0\n```\nNo:\n```python\ndef f(x):\n    return x + 1\n```\n```\n>>> f(1)\n```",
        "```python\n" + PROMPT + "    return x + 1\n```",
        PROMPT + "    return x + 1\n",
    ],
)
def test_function_is_completed_in_some_way_it_works(text: str):
    code = complete_code(PROMPT, text, "f")
    assert value(code) == 2
    assert value(code, "base(2)") == 20  # what the prompt has before it stays


@pytest.mark.parametrize("text", ["", "\n\n", "I cannot do that.", "    return (", "```python\n```"])
def test_function_is_not_completed_there_is_no_code(text: str):
    assert complete_code(PROMPT, text, "f") is None


def test_tests_are_inspected_entry_points_and_imports_are_found():
    needs = inspect_tests(
        ["assert f([x for x in range(3)]) == math.pi", "r = g(2)\nassert r == np.size and sys.maxsize"],
        reference="import numpy as np\nfrom math import tau\ndef f(a): return a\ndef g(b): return tau\n",
    )
    assert needs.entry_points == ("f", "g")
    assert sorted(needs.imports.splitlines()) == ["import math", "import numpy as np", "import sys"]
    assert needs.weak == ""


def test_entry_point_is_called_like_a_builtin_the_solution_tells():
    assert inspect_tests(["assert sum(10, 15) == 6"], reference="def sum(a, b): return 6").entry_points == ("sum",)
    assert inspect_tests(["assert f(sum([1, 2])) == 6"], reference="def f(a): return 6").entry_points == ("f",)


@pytest.mark.parametrize(
    ("tests", "reference", "weak"),
    [
        (["assert f(lambda a: a) == 1"], "def f(g): return 1", True),
        (["assert f([1], int) == 1"], "def f(a, b): return 1", True),
        (["assert f(key=len) == 1"], "def f(key): return 1", True),
        (["assert f([f]) == 1"], "def f(a): return 1", True),
        (["def g(a): return a\nassert f(g) == 1"], "def f(a): return 1", True),
        (["class A: pass\nassert f(A()) == 1"], "def f(a): return 1", True),
        (["assert f(Node(1)) == 1"], "class Node: pass\ndef f(a): return 1", True),
        (["assert f(Node(1)) == 1"], "", True),
        (["assert f(list(map(len, ['a']))) == 1"], "def f(a): return 1", False),
        (["assert list(map(f, [1])) == sorted([1], key=lambda a: a)"], "def f(a): return 1", False),
        (["str = 'a'\nassert f(str) == 1"], "def f(a): return 1", False),
        (["assert f(g(1)) == {**f(2)}"], "def f(a): return 1\ndef g(a): return 1", False),
    ],
)
def test_tests_need_objects_of_the_code_or_give_it_functions_they_are_weak(
    tests: list[str], reference: str, weak: bool
):
    assert bool(inspect_tests(tests, reference=reference).weak) == weak


def test_setup_is_inspected_as_the_tests_are():
    needs = inspect_tests(["assert f(root) == 1"], "root = Node(1)", "class Node: pass\ndef f(a): return 1")
    assert needs.weak == "the tests need the class Node of the code"
    assert needs.entry_points == ("Node", "f")
