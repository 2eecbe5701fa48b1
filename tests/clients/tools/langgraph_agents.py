"""LangChain's agents over OpenAI's two APIs, Anthropic's and Ollama's, whole and streamed."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

URL = sys.argv[1]
BASE = URL.removesuffix("/v1")
OPENAI = {"model": "tiny-text", "base_url": URL, "api_key": "none", "max_retries": 0}


@tool
def weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


models = [
    ChatOpenAI(**OPENAI),
    ChatOpenAI(**OPENAI, use_responses_api=True),
    ChatAnthropic(model="tiny-text", base_url=BASE, api_key="none", max_retries=0),
    ChatOllama(model="tiny-text", base_url=BASE),
]
for model in models:
    agent = create_agent(model, [weather], system_prompt="Help.")
    asked = {"messages": [("user", "Paris?")]}
    messages = agent.invoke(asked)["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"], messages
    assert messages[1].tool_calls[0]["args"] == {"city": "Paris"}, messages
    assert messages[2].content == "sunny in Paris"
    assert messages[3].text == "It is sunny.", messages
    pieces = [piece for piece, _ in agent.stream(asked, stream_mode="messages")]
    texts = "".join(piece.text for piece in pieces if piece.type == "AIMessageChunk")
    assert texts == "It is sunny.", (type(model), texts)
