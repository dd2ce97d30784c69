"""Conversations to tokens: sandboxed chat templates, special tokens from the template alone, loss on the assistant."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, wraps
from operator import mod
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from palestra.data.media import Image, is_image, part_image
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError

Message = Mapping[str, Any]
"""One turn: `role`, `content` (a string or OpenAI's list of parts, texts and images), and what the template reads."""


@dataclass(frozen=True)
class EncodedChat:
    """The tokens of a conversation, and which of them (the assistant's) are trained on."""

    tokens: list[int]
    loss_mask: list[bool]
    images: tuple[Image, ...] = ()
    """What its tokens of images stand for."""

    def expanded(self, images: Sequence[Image], tokenizer: Tokenizer) -> "EncodedChat":
        """With as many tokens for each image as it has, in place of the one that the template writes."""
        pad = tokenizer.image_pad
        found = 0 if pad is None else self.tokens.count(pad)
        if found != len(images):
            raise UsageError(
                f"the chat template of {tokenizer.name} writes {found} image tokens for {len(images)} images: give the "
                "model a template that writes <|vision_start|><|image_pad|><|vision_end|> for each"
            )
        tokens, mask, placed, left = [], [], [], iter(images)
        for token, trained in zip(self.tokens, self.loss_mask, strict=True):
            if token == pad:
                placed.append(next(left).at(len(tokens)))
            count = placed[-1].tokens if token == pad else 1
            tokens += [token] * count
            mask += [trained] * count
        return EncodedChat(tokens, mask, tuple(placed))


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The conversation as the tokenizer's chat template writes it, as transformers' `apply_chat_template` would.

    Content may also be OpenAI's list of text parts, which are joined by line breaks, and of images. The string is for
    reading: encoded with `specials=True`, special strings inside the messages would count. `encode_chat` gives tokens.
    """
    return _rendered(tokenizer, _plain(messages, tokenizer)[0], add_generation_prompt, tools, variables)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> EncodedChat:
    """The tokens of a conversation and its loss mask.

    *Tokens* are those of the whole rendered string, as transformers gives them, merges over the borders of contents
    included; no BOS is added to what the template writes. Special ids come from the template alone: a special string
    inside a message, a tool or a variable is hidden from the template behind a private-use character and then encoded
    as text; half a one at the edge of a string, which the template's next character could complete, is set apart. So
    ordinary content reaches the template unchanged, and templates may trim, split or test it. (Roles are set apart
    from nothing: some templates build `<|user|>` out of them.)

    *Mask.* With a generation prompt the conversation is a prompt: nothing of it is trained. Otherwise,
    where the template has `{% generation %}` blocks, they say what is trained, and the special token that directly
    follows one is trained with it. Without blocks an assistant turn is what its message adds to the conversation before
    it with a generation prompt, up to the special token that ends the turn, or up to the end where there is none; that
    conversation, the one with the turn and the whole must each begin with the one before, as strings, or the template
    is refused. A token that reaches into a turn from before it is trained.

    *Images* are read, resized and placed: the one token that the template writes for each becomes as many as it has.
    """
    messages, images = _plain(messages, tokenizer)
    hidden = _Hidden(tokenizer, [messages, tools, variables])
    safe_messages, safe_tools, safe_variables = hidden.messages(messages), hidden(tools), hidden(variables)
    marks = safe_variables[GENERATION_MARKS] = (hidden.fresh(), hidden.fresh())

    def written(count: int, prompt: bool) -> str:
        return _rendered(tokenizer, safe_messages[:count], prompt, safe_tools, safe_variables)

    text = written(len(messages), add_generation_prompt)
    parts, spans = hidden.parts(text, marks)
    if add_generation_prompt:
        tokens = tokenizer.encode_parts(parts)[0]
        return EncodedChat(tokens, [False] * len(tokens)).expanded(images, tokenizer)
    blocks = re.search(r"\{%[-+]?\s*generation\b", _template_of(tokenizer)) is not None
    for index, message in enumerate(messages):
        if not blocks and message["role"] == "assistant":
            before, after = written(index, True), written(index + 1, False)
            if not after.startswith(before) or not text.startswith(after):
                raise UsageError(
                    f"the chat template does not separate the assistant turn of message {index} from the rest: the "
                    "conversation before it with a generation prompt, the one up to it, and the whole do not begin "
                    "alike (a template may drop the reasoning of earlier turns or add words to the prompt). Train on "
                    "each turn as a conversation of its own, or give a template that marks what is trained with "
                    "{% generation %} … {% endgeneration %}"
                )
            spans.append((hidden.length(before), hidden.length(after)))
    tokens, places = tokenizer.encode_parts(parts)
    mask = [False] * len(tokens)
    for span in spans:
        for index in _trained(tokenizer, tokens, places, span, blocks):
            mask[index] = True
    return EncodedChat(tokens, mask).expanded(images, tokenizer)


def encode_after(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    new: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> EncodedChat:
    """The tokens between an assistant's turn that follows `messages` and the turn that follows the `new` messages.

    They begin where the template ends a turn and end with the generation prompt; what the turn itself holds does not
    matter. A template that renders `messages` differently once more follow is refused.
    """
    (messages, _), (new, images) = _plain(messages, tokenizer), _plain(new, tokenizer)
    hidden = _Hidden(tokenizer, [messages, new, tools, variables])
    turn = {"role": "assistant", "content": hidden.fresh()}
    before, after, safe_tools = hidden.messages(messages), hidden.messages(new), hidden(tools)
    start = _rendered(tokenizer, before, True, safe_tools, hidden(variables))
    whole = _rendered(tokenizer, [*before, turn, *after], True, safe_tools, hidden(variables))
    opening, found, rest = whole[len(start) :].partition(turn["content"])
    if not whole.startswith(start) or not found or opening.strip() or turn["content"] in rest:
        raise UsageError(
            f"the chat template of {tokenizer.name} renders the beginning of a conversation differently once more "
            "turns follow, which would change tokens that the model has read and sampled"
        )
    tokens = tokenizer.encode_parts(hidden.parts(rest, (hidden.fresh(), hidden.fresh()))[0])[0]
    return EncodedChat(tokens, [False] * len(tokens)).expanded(images, tokenizer)


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token with which the template ends an assistant's turn: where generation stops, often not at EOS."""
    # Words that the template writes anyway: a tokenizer of characters may know no others.
    probe: list[dict[str, Any]] = [{"role": role, "content": role} for role in ("user", "assistant")]
    encoded = encode_chat(tokenizer, probe, add_generation_prompt=False)
    trained = [token for token, used in zip(encoded.tokens, encoded.loss_mask, strict=True) if used]
    return trained[-1] if trained and trained[-1] in tokenizer.special_ids else None


def _trained(
    tokenizer: Tokenizer, tokens: list[int], places: list[tuple[int, int]], span: tuple[int, int], block: bool
) -> range:
    """The indices of the tokens of one assistant turn that are trained."""
    begin, end = span
    inside = [index for index, (start, stop) in enumerate(places) if max(start, begin) < min(stop, end)]
    if not inside:
        return range(0)
    last = inside[-1]
    closing = _closing(tokenizer, tokens, inside)
    if not block:
        last = last if closing is None else closing
    elif closing is None and last + 1 < len(tokens) and tokens[last + 1] in tokenizer.special_ids:
        # A block around the content alone would leave the model without a reason to stop.
        last += tokens[last + 1] != tokenizer.bos or tokens[last + 1] == tokenizer.eos
    return range(inside[0], last + 1)


def _closing(tokenizer: Tokenizer, tokens: list[int], inside: list[int]) -> int | None:
    """Where the special token stands that closes a turn, with nothing but white space after it."""
    for index in reversed(inside):
        if tokens[index] in tokenizer.special_ids:
            return index
        if tokenizer.piece(tokens[index]).strip():
            return None
    return None


@lru_cache(maxsize=32)
def _edges(strings: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str], int]:
    """What special strings can begin with and end with, short of the whole, and the length of the longest."""
    heads = frozenset(string[:size] for string in strings for size in range(1, len(string)))
    tails = frozenset(string[size:] for string in strings for size in range(1, len(string)))
    return heads, tails, max(map(len, strings), default=0)


class _Hidden:
    """Replaces special strings in the users' texts by private-use characters that occur in none of them."""

    def __init__(self, tokenizer: Tokenizer, texts: Any):
        self._strings = tokenizer.special_strings
        self._find = re.compile("|".join(map(re.escape, sorted(self._strings, key=len, reverse=True))) or "(?!)")
        taken = json.dumps(texts, ensure_ascii=False, default=str) + _template_of(tokenizer)
        self._free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in taken)
        self._border = self.fresh()
        self._stand_ins: defaultdict[str, str] = defaultdict(self._free.__next__)

    def fresh(self) -> str:
        """A character that occurs nowhere yet."""
        return next(self._free)

    def __call__(self, value: Any) -> Any:
        """The value with special strings hidden in all of its strings."""
        if isinstance(value, str):
            return self._apart(self._hide(value))
        if isinstance(value, Mapping):
            return {self._hide(key): self(entry) for key, entry in value.items()}
        if isinstance(value, Sequence):
            return [self(entry) for entry in value]
        return value

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The same for messages, whose keys and roles a template must find as they are."""
        return [
            {key: self._hide(entry) if key == "role" else self(entry) for key, entry in message.items()}
            for message in messages
        ]

    def parts(self, text: str, marks: tuple[str, str]) -> tuple[list[tuple[str, bool]], list[tuple[int, int]]]:
        """A rendered text as parts for the tokenizer, and the spans between the marks of generation blocks."""
        originals = {stand_in: string for string, stand_in in self._stand_ins.items()}
        parts: list[tuple[str, bool]] = []
        spans, begins, length = [], [], 0
        for piece in re.split(f"([{''.join((self._border, *marks, *originals))}])", text):
            if piece == marks[0]:
                begins.append(length)
            elif piece == marks[1]:
                spans.append((begins.pop(), length))
            elif piece != self._border:
                parts.append((originals.get(piece, piece), piece not in originals))
                length += len(parts[-1][0])
        return parts, spans

    def length(self, text: str) -> int:
        """How many characters a rendered text has once nothing in it is hidden."""
        longer = sum(text.count(stand_in) * (len(string) - 1) for string, stand_in in self._stand_ins.items())
        return len(text) - text.count(self._border) + longer

    def _hide(self, text: str) -> str:
        return self._find.sub(lambda match: self._stand_ins[match[0]], text)

    def _apart(self, text: str) -> str:
        heads, tails, longest = _edges(self._strings)
        opens = any(text[-size:] in heads for size in range(1, longest))
        closes = any(text[:size] in tails for size in range(1, longest))
        return self._border * closes + text + self._border * opens


def _plain(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[dict[str, Any]], list[Image]]:
    """The messages with lists of text parts joined into strings, and their images, of which only the places are left.

    Where there are images the content stays a list, in which templates find them.
    """
    plain, images = [], []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"message {index} is not an object with a role: {message!r}")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            seen = [_image(part, index, tokenizer) for part in content if is_image(part)]
            images += seen
            for part in (part for part in content if not is_image(part)):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
                    raise UsageError(f"message {index} has a content part of type {kind!r}: expected text or image_url")
            parts = [{"type": "image"} if is_image(part) else dict(part) for part in content]
            message = {**message, "content": parts if seen else "\n".join(part["text"] for part in content)}
        plain.append(dict(message))
    return plain, images


def _image(part: Mapping[str, Any], index: int, tokenizer: Tokenizer) -> Image:
    if tokenizer.pixels is None:
        raise UsageError(f"message {index} has an image, and the model of {tokenizer.name} reads text only")
    try:
        return part_image(part, tokenizer.pixels)
    except UsageError as error:
        raise UsageError(f"message {index}: {error}") from error


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Message], prompt: bool, tools: Any, variables: Mapping[str, Any]
) -> str:
    template = _template_of(tokenizer)
    values = {**tokenizer.named_specials, "documents": None, GENERATION_MARKS: ("", ""), **variables}
    values |= {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
    try:
        _steps_left.set(STEPS)
        return compile_template(template).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"the chat template of {tokenizer.name} is not valid, line {error.lineno}: {error}") from error
    except Exception as error:  # a template is a program of somebody else's: it can fail in any way
        raise UsageError(f"the chat template of {tokenizer.name} refused the conversation: {error}") from error


def _template_of(tokenizer: Tokenizer) -> str:
    if tokenizer.chat_template is None:
        raise UsageError(
            f"the tokenizer {tokenizer.name} has no chat template, so it cannot encode conversations. Put a "
            "chat_template.jinja next to its tokenizer.json, or give one with Tokenizer.with_chat_template"
        )
    return tokenizer.chat_template


GENERATION_MARKS = "_generation_marks"
"""The variable with the two strings that a render puts around each `{% generation %}` block."""


LONGEST = 2**23
"""Characters of a string or members of a list, far beyond any context; what makes a longer one is refused."""
STEPS = 500_000
"""Calls, turns of loops and pieces of text that one rendering may take; a long value counts as several."""
_steps_left = ContextVar("steps_left", default=STEPS)


class _Generation(Extension):
    """`{% generation %}`: the assistant's text, between the marks of the render."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = nodes.Name(GENERATION_MARKS, "load")
        return nodes.CallBlock(self.call_method("_between", [marks]), [], [], body).set_lineno(line)

    def _between(self, marks: tuple[str, str], caller: Macro) -> str:
        return marks[0] + caller() + marks[1]


class _Namespace(Namespace):
    """Jinja's `namespace` without names that begin with an underscore, which Python itself would look up."""

    def __init__(self, *values: Any, **named: Any):
        for name in dict(*values, **named):
            _allow(name)
        super().__init__(*values, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        _allow(name)
        super().__setitem__(name, value)


def _allow(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"the name {name!r} is not allowed in a namespace")


def _spend(size: int) -> None:
    """Count a step, and more for a long value; refuse unlimited growth or loops."""
    _steps_left.set(left := _steps_left.get() - 1 - size // 256)
    if size > LONGEST:
        raise SecurityError(f"it makes a value of {size:.2g} characters or members, of which {LONGEST:,} are allowed")
    if left < 0:
        raise SecurityError(f"it takes more than {STEPS:,} steps")


def _size(value: Any) -> int:
    """How much a value holds; the digits of a number count more, because to multiply them takes longer."""
    if isinstance(value, int):
        return value.bit_length() * 256
    inside = value if isinstance(value, list | tuple) else ()
    return (len(value) if isinstance(value, Sized) else 1) + sum(len(one) for one in inside if isinstance(one, str))


def _charge(function: Any, values: Sequence[Any]) -> None:
    """Count a call by what its values hold, and where these say how wide or long the result is by that."""
    function = getattr(function, "__wrapped__", function)  # the sandbox has a format of its own
    values = [getattr(function, "__self__", None), *values]
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int)]
    size = sum(_size(value) for value in values if not isinstance(value, int))
    name = getattr(function, "__name__", "").removeprefix("do_")
    if name in ("center", "indent", "ljust", "rjust", "zfill", "slice", "sync_slice", "batch", "expandtabs"):
        size += sum(numbers) * (1 + texts[0].count("\n") + texts[0].count("\t") if texts else 1)
    elif name in ("format", "format_map", "mod") and texts:  # `%9d`, `%*d`, `{:9}`, `{:{}}`
        size += sum(map(int, re.findall(r"\d+", texts[0]))) + sum(numbers) * bool(re.search(r"\*|:\{", texts[0]))
    elif name == "replace" and len(texts) > 2:
        size += texts[0].count(texts[1]) * len(texts[2])
    _spend(size)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts."""

    @wraps(function)
    def bounded(*values: Any, **named: Any) -> Any:
        _charge(function, [*values, *named.values()])
        result = function(*values, **named)
        _spend(_size(result))
        return result

    return bounded


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that limits loops, calls and the growth of values."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.EnvironmentAttribute("counted"), [loop.iter], [], None, None)
        for sum_ in list(tree.find_all(nodes.Concat)):
            sum_.nodes = [nodes.Call(nodes.EnvironmentAttribute("concat"), [nodes.List(sum_.nodes)], [], None, None)]
        return tree

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, one step each."""
        for value in values:
            _spend(0)
            yield value

    def concat(self, pieces: Iterable[Any]) -> str:
        """The output of a template, a macro, a block or `~`."""
        written, size = [], 0
        for piece in map(str, pieces):
            size += len(piece)
            _spend(len(piece) if size <= LONGEST else size)
            written.append(piece)
        return "".join(written)

    def call(self, context: Any, function: Any, /, *values: Any, **named: Any) -> Any:
        """Call a function, method or macro."""
        _charge(function, [*values, *named.values()])
        result = super().call(context, function, *values, **named)
        _spend(_size(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator, if that is not too long."""
        if operator == "%" and isinstance(left, str):
            _charge(mod, [left, *(right if isinstance(right, tuple) else [right])])
        elif operator == "**" or isinstance(left, Sized):
            _spend(_size(left) * abs(right) if isinstance(right, int) else _size(left) + _size(right))
        else:
            _spend(_size(right) * abs(left) if isinstance(right, Sized) else _size(left) + _size(right))
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=32)
def compile_template(template: str) -> jinja2.Template:
    """The template in the environment that transformers gives it, sandboxed.

    One that takes too many steps or grows too long raises jinja2's SecurityError.
    """
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters = {name: _bounded(one) for name, one in environment.filters.items()}
    environment.globals.pop("lipsum")  # unlimited text
    environment.filters["tojson"] = _to_json
    now = {"strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template, globals={"raise_exception": _raise, "namespace": _Namespace, **now})


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent not in (None, *range(101)):
        raise SecurityError(f"tojson(indent={indent}) is wider than 100")
    # Jinja's own filter writes < as \u003c, for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)
