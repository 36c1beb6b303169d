"""Renders the templates of this folder with Jinja2, configured as in the transformers library, into expected.json.

    pip install jinja2 && python3 render_reference.py
"""

import datetime
import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

NOW = 1_798_718_399


class Generation(jinja2.ext.Extension):
    """{% generation %}: marks the model's own text, which stays unchanged."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    @staticmethod
    def mark(caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(format)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return env


def message(role, content, **extra):
    return dict(role=role, content=content, **extra)


USER = message("user", "  Tell me about the sea & the <sun>.\n")
SYSTEM = message("system", "You are brief. ")
ANSWER = message("assistant", "<think>\nIt is blue.\n</think>\n\nIt is wet.")
AGAIN = message("user", "你好 👍🏽\n\nAnd the moon's?")
PARTS = message("user", [{"type": "image"}, {"type": "text", "text": " What is this? "}, {"type": "image", "image": "x"}])
CALL = {
    "name": "weather",
    "arguments": {"city": "Zürich", "days": 3, "units": {"t": "°C"}, "exact": True, "tags": ["a"], "at": None},
}
CALLING = message("assistant", "Let me look.", tool_calls=[{"type": "function", "function": CALL}])
THINKING = message("assistant", "", tool_calls=[CALL, CALL], reasoning_content="hm ")
RESULT = message("tool", '{"temperature": 21.5}')
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city, \"now\" & <later>.\n",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "extra": []},
    },
}
VALUE = {
    "text": "ab-cd-ef",
    "list": [1, 2, 3],
    "float": 0.1,
    "small": 1.5e-7,
    "large": 1e22,
    "whole": 2.0,
    "quote": "it's",
    "uni": "é👍\u007f\t\u0001/",
    "odd": "\u00a0\u00ad\u0301\u0378\u200b\u2028\u3000\ue000\U000e0001é",
    "none": None,
    "flag": True,
    "nested": {"z": [], "a": {}, "m": [{"x": 1}]},
}

CASES = [
    ("chatml", dict(messages=[USER])),
    ("chatml", dict(messages=[SYSTEM, USER, ANSWER, AGAIN], add_generation_prompt=False)),
    ("qwen_like", dict(messages=[USER])),
    ("qwen_like", dict(messages=[SYSTEM, USER], variables=dict(enable_thinking=False))),
    ("qwen_like", dict(messages=[SYSTEM, USER, ANSWER, AGAIN], variables=dict(enable_thinking=True))),
    ("qwen_like", dict(messages=[USER, ANSWER], add_generation_prompt=False)),
    ("qwen_like", dict(messages=[PARTS], variables=dict(add_picture_numbers=True))),
    ("qwen_like", dict(messages=[SYSTEM, USER, CALLING, RESULT, RESULT], tools=[TOOL, TOOL])),
    ("qwen_like", dict(messages=[USER, THINKING, RESULT, AGAIN], tools=[TOOL])),
    ("qwen_like", dict(messages=[USER, SYSTEM])),
    ("qwen_like", dict(messages=[])),
    ("qwen_like", dict(messages=[message("judge", "x")])),
    ("gemma_like", dict(messages=[USER])),
    ("gemma_like", dict(messages=[SYSTEM, USER, ANSWER, PARTS])),
    ("gemma_like", dict(messages=[SYSTEM, USER, ANSWER], add_generation_prompt=False)),
    ("gemma_like", dict(messages=[USER, AGAIN])),
    ("gemma_like", dict(messages=[message("user", 5)])),
    ("llama_like", dict(messages=[USER])),
    ("llama_like", dict(messages=[SYSTEM, USER, message("assistant", " Yes. "), AGAIN])),
    ("llama_like", dict(messages=[SYSTEM, USER, CALLING, RESULT], tools=[TOOL])),
    ("llama_like", dict(messages=[USER], variables=dict(date_string="1 Jan 2001"))),
    ("llama_like", dict(messages=[message("assistant", "", tool_calls=[])])),
    ("python_isms", dict(messages=[SYSTEM, USER, AGAIN], variables=dict(value=VALUE))),
]


def render(template, request):
    text = (pathlib.Path(__file__).parent / f"{template}.jinja").read_text(encoding="utf-8")
    context = dict(tools=None, documents=None, add_generation_prompt=True, bos_token="<bos>", eos_token="<eos>")
    context |= request.get("variables", {}) | {key: value for key, value in request.items() if key != "variables"}
    try:
        return dict(text=environment().from_string(text).render(**context))
    except jinja2.exceptions.TemplateError as error:
        return dict(refused=str(error))


if __name__ == "__main__":
    cases = [dict(template=template, request=request, expected=render(template, request)) for template, request in CASES]
    document = dict(now=NOW, cases=cases)
    path = pathlib.Path(__file__).parent / "expected.json"
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
