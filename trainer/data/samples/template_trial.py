"""A chat template's first rendering, in a process of its own: a template is a program, and may never end."""

import json
import signal
import subprocess
import sys
from typing import Any

from transformers import PreTrainedTokenizerBase

from shardwright.errors import UserError

_SECONDS, _GIB = 20, 4  # of CPU, and of memory; a conversation needs a hundredth
_TOO_LARGE = 9
# an error of the template's own is left to the run, which meets it too
_PROGRAM = f"""
import json, resource, sys
from transformers.utils.chat_template_utils import render_jinja_template
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({_GIB << 30}, {_GIB << 30}))
given = json.load(sys.stdin)
for prompts in (False, True):
    try:
        render_jinja_template(add_generation_prompt=prompts, **given)
    except MemoryError:
        sys.exit({_TOO_LARGE})
    except Exception:
        pass
"""
_tried = set[str]()  # templates


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], asked: str, instead: str, *, answer: bool = True
) -> str:
    """The conversation as text, with the beginning of an ``answer`` or open at its last message.

    Raises UserError where no chat template takes it, of what was ``asked`` and ``instead`` of it.
    """
    try_template(tokenizer, messages)
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answer, continue_final_message=not answer
        )
        return str(text)
    except Exception as error:  # jinja's, or the tokenizer's if there is no template
        raise UserError(
            asked=asked,
            found=f"{type(error).__name__}: {str(error)[:300]}",
            why="the tokenizer has no chat template that takes these messages",
            instead=instead,
        ) from error


def try_template(tokenizer: PreTrainedTokenizerBase, messages: list[Any], tools: list[Any] | None = None) -> None:
    """Raises UserError if the chat template does not come to an end on the first conversation that it is given."""
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError:  # there is none for it, which the run tells
        return
    if template in _tried:
        return
    given = {"conversations": [messages], "tools": tools, "chat_template": template, **tokenizer.special_tokens_map}
    words = [sys.executable, "-P", "-c", _PROGRAM]
    tried = subprocess.run(words, input=json.dumps(given, default=str), text=True, capture_output=True, check=False)
    if tried.returncode in (-signal.SIGKILL, -signal.SIGXCPU, _TOO_LARGE):
        raise UserError(
            asked=f"the chat template of {tokenizer.name_or_path or type(tokenizer).__name__}",
            found=f"it takes more than {_SECONDS} s or {_GIB} GiB to render {json.dumps(messages, default=str)[:200]}",
            why="it is a program of the tokenizer's files, and this one may never end",
            instead="a tokenizer whose template you trust (--tokenizer)",
        )
    _tried.add(template)
