"""LangChain's ChatOpenAI: an answer, a stream, a tool, a schema."""

import os
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = os.environ.get("KEEL_URL", "http://127.0.0.1:8080")
chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=os.environ.get("KEEL_MODEL", "demo"), temperature=0,
                  max_tokens=100, max_retries=0)
answer = chat.invoke("Tell me a story about a dog.")
assert answer.content and answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in chat.stream("Tell me a story about a dog.")) == answer.content


@tool
def weather(city: Literal["Bern", "Rome"]) -> str:
    """Tells the weather."""
    return f"sunny in {city}"


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]


called = chat.bind_tools([weather], tool_choice="weather").invoke("How is it in Bern?")
assert called.tool_calls[0]["args"]["city"] in ("Bern", "Rome")
assert chat.with_structured_output(Animal).invoke("Which animal?").kind in ("cat", "dog")
print("langchain works")
