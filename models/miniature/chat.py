# ruff: noqa: E501 -- the wire format has long lines
"""DeepSeek V4's chat wire format, for training on a machine that has no vLLM.

The fixed sentences below are the format itself, as published with DeepSeek-V4: a model only understands a server
that writes exactly them. `tests/test_chat.py` asserts equality with vLLM's own encoder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"

# Order fixes the ids: bos 0, eos 1, pad 2. The second list is shown in decoded text, as in V4.
HIDDEN_TOKENS = [BOS, EOS, PAD]
VISIBLE_TOKENS = [
    USER,
    ASSISTANT,
    THINK,
    END_THINK,
    DSML,
    "<｜latest_reminder｜>",
    "<｜deepseek_image｜>",
]
VISIBLE_TOKENS += [
    f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url")
]
VISIBLE_TOKENS += [f"<｜fim▁{part}｜>" for part in ("begin", "hole", "end")]

EFFORT = {
    "low": "",
    "high": "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n",
    "max": "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
    "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
    "underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n",
}
TOOLS_BEFORE = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_AFTER = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

Message = dict[str, Any]


@dataclass
class Chat:
    """A conversation in OpenAI's shape, with the two switches of V4's encoder."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False
    effort: str = "high"


def tool_calls_text(calls: list[dict[str, Any]]) -> str:
    """The DSML block of an assistant turn; `calls` in OpenAI's shape, arguments a dict or a JSON string."""
    lines = [f"<{DSML}tool_calls>"]
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        lines.append(f'<{DSML}invoke name="{function["name"]}">')
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            text = value if is_string else json.dumps(value, ensure_ascii=False)
            flag = str(is_string).lower()
            lines.append(f'<{DSML}parameter name="{key}" string="{flag}">{text}</{DSML}parameter>')
        if not arguments:
            lines.append("")
        lines.append(f"</{DSML}invoke>")
    return "\n".join([*lines, f"</{DSML}tool_calls>"])


def _tools_text(tools: list[dict[str, Any]]) -> str:
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return f"\n\n{TOOLS_BEFORE}{schemas}{TOOLS_AFTER}"


def segments(chat: Chat) -> list[tuple[str, bool]]:
    """Cut a conversation into (text, is_the_model's_own) pieces; their texts joined are what a server encodes.

    Ends with the opening of an assistant turn when the last message is the user's or a tool's.
    """
    messages = chat.messages
    if chat.tools and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    asked = max(i for i, m in enumerate(messages) if m["role"] in ("user", "tool"))
    first_of_run = asked  # consecutive user and tool messages are one user turn
    while first_of_run and messages[first_of_run - 1]["role"] in ("user", "tool"):
        first_of_run -= 1
    keep_thoughts = bool(chat.tools)

    prompt = BOS + (EFFORT[chat.effort] if chat.thinking else "")
    out: list[tuple[str, bool]] = []
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "system":
            prompt += message.get("content") or ""
            if chat.tools:
                prompt += _tools_text(chat.tools)
        elif role in ("user", "tool"):
            text = message.get("content") or ""
            if role == "tool":
                text = f"<tool_result>{text}</tool_result>"
            continues = i > 0 and messages[i - 1]["role"] in ("user", "tool")
            prompt += f"\n\n{text}" if continues else USER + text
            if i + 1 < len(messages) and messages[i + 1]["role"] in ("user", "tool"):
                continue
            thinks = chat.thinking and (keep_thoughts or i >= first_of_run)
            prompt += ASSISTANT + (THINK if thinks else END_THINK)
        elif role == "assistant":
            own = ""
            if chat.thinking and (keep_thoughts or i > asked):
                own = (message.get("reasoning") or "") + END_THINK
            own += message.get("content") or ""
            if message.get("tool_calls"):
                own += "\n\n" + tool_calls_text(message["tool_calls"])
            out += [(prompt, False), (own + EOS, True)]
            prompt = ""
        else:
            raise ValueError(f"chat: role {role!r} is not part of the training format")
    return [*out, (prompt, False)] if prompt else out


def prompt_text(chat: Chat) -> str:
    """The whole text, as the server sends it to the model."""
    return "".join(text for text, _ in segments(chat))
