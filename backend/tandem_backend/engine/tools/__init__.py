# SPDX-License-Identifier: Apache-2.0
"""Tool calls: the formats that chat templates ask for, parsed from the stream and enforced by a grammar.

spec.py      the request's tools and their schemas
values.py    the type of an argument that came as plain text
parser.py    what a parser of any format does, and the formats
hermes.py    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
qwen_xml.py  <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
grammar.py   the grammar of "this answer is a tool call", by format
"""

from collections.abc import Sequence

from tandem_backend.engine.tools.hermes import HermesParser
from tandem_backend.engine.tools.parser import ToolCallDelta, ToolCallParser, ToolFormat, tool_format
from tandem_backend.engine.tools.qwen_xml import QwenXmlParser
from tandem_backend.engine.tools.spec import Tool, read_tools

__all__ = ["Tool", "ToolCallDelta", "ToolCallParser", "ToolFormat", "make_parser", "read_tools", "tool_format"]


def make_parser(form: ToolFormat, tools: Sequence[Tool]) -> ToolCallParser:
    return HermesParser(tools) if form is ToolFormat.HERMES else QwenXmlParser(tools)
