# SPDX-License-Identifier: Apache-2.0
"""The requests of a release record: one of every way to ask that may take another path through the code."""

from typing import Any

_CODE = 'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a file as a list."""\n'
_PROSE = "### `shutil.copytree(src, dst)`\n\nRecursively copy an entire directory tree"
_CHAT = [{"role": "user", "content": "What does json.dumps do?"}]
_TURNS = [
    {"role": "system", "content": "You explain the Python standard library."},
    {"role": "user", "content": "How do I join two paths?"},
    {"role": "assistant", "content": "Use `os.path.join(a, b)`, or `Path(a) / b` with pathlib."},
    {"role": "user", "content": "And how do I get the file's suffix?"},
]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search_docs",
            "description": "Search the documentation of the Python standard library.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]

REQUESTS: tuple[dict[str, Any], ...] = (
    {"name": "prose-streamed", "prompt": _PROSE, "max_tokens": 64},
    {"name": "prose-whole", "prompt": _PROSE, "max_tokens": 64, "stream": False},
    {"name": "code-streamed", "prompt": _CODE, "max_tokens": 96},
    {"name": "one-token", "prompt": _CODE, "max_tokens": 1},
    {"name": "long", "prompt": _PROSE, "max_tokens": 200, "ignore_eos": True},
    {"name": "unicode-whole", "prompt": "naïve café ☕ 日本語 👩‍💻: ", "max_tokens": 24, "stream": False},
    {"name": "chat-streamed", "messages": _CHAT, "max_tokens": 64},
    {"name": "chat-turns-whole", "messages": _TURNS, "max_tokens": 64, "stream": False},
    {"name": "chat-thinking", "messages": _CHAT, "enable_thinking": True, "max_tokens": 64},
    {"name": "chat-no-thinking", "messages": _TURNS, "enable_thinking": False, "max_tokens": 48},
    {"name": "chat-tools", "messages": _CHAT, "tools": _TOOLS, "max_tokens": 64},
    {"name": "stop-strings", "prompt": _CODE, "stop": ["\n\n", "return"], "max_tokens": 96},
    {"name": "min-tokens", "messages": _CHAT, "min_tokens": 80, "max_tokens": 96},
)
