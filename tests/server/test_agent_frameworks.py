"""Agents of other packages, where they are installed, call tools through ``rose serve`` and use what these return."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live_server import LiveServer, running_server
from tests.support.scripted_checkpoint import CONCLUSION, write_scripted_qwen3

MODEL = "scripted"
QUESTION = "What's the weather in Tokyo?"


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = {
        "served_model_names": (MODEL,),
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    with running_server(write_scripted_qwen3(tmp_path_factory.mktemp("scripted")), settings) as server:
        yield server
        server.wait_until_idle()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("route", ["responses", "chat completions"])
def test_openai_agents(agent_server: LiveServer, route: str, streams: bool) -> None:
    agents: Any = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    cities = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Say what the weather of a city is."""
        cities.append(city)
        return "sunny"

    async def run() -> Any:
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=f"{agent_server.url}/v1", api_key="unused", max_retries=0)
        model_class = (
            agents.OpenAIResponsesModel if route == "responses" else agents.OpenAIChatCompletionsModel
        )
        model = model_class(model=MODEL, openai_client=client)
        agent = agents.Agent(name="weather", instructions="Be brief.", tools=[get_weather], model=model)
        if not streams:
            return await agents.Runner.run(agent, input=QUESTION)
        running = agents.Runner.run_streamed(agent, input=QUESTION)
        async for _ in running.stream_events():
            pass
        return running

    result = asyncio.run(run())
    assert result.final_output == CONCLUSION and cities == ["Tokyo"]
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert result.context_wrapper.usage.requests == 2
    # Streamed chats are not asked for their token counts.
    assert bool(result.context_wrapper.usage.output_tokens) == (route == "responses" or not streams)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("route", ["chat completions", "responses", "messages"])
def test_langgraph(agent_server: LiveServer, route: str, streams: bool) -> None:
    prebuilt: Any = pytest.importorskip("langgraph.prebuilt")
    tools: Any = pytest.importorskip("langchain_core.tools")
    options: dict[str, Any] = {"model": MODEL, "api_key": "unused", "max_retries": 0, "max_tokens": 60}
    if route == "messages":
        package: Any = pytest.importorskip("langchain_anthropic")
        model = package.ChatAnthropic(base_url=agent_server.url, **options)
    else:
        package = pytest.importorskip("langchain_openai")
        uses_responses = route == "responses"
        model = package.ChatOpenAI(
            base_url=f"{agent_server.url}/v1", use_responses_api=uses_responses, **options
        )
    cities = []

    @tools.tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Say what the weather of a city is."""
        cities.append(city)
        return "sunny"

    agent = prebuilt.create_react_agent(model, [get_weather])
    asked = {"messages": [("user", QUESTION)]}
    if streams:
        pieces = [piece for piece, _ in agent.stream(asked, stream_mode="messages") if piece.type != "tool"]
        assert CONCLUSION in "".join(piece.text for piece in pieces)
    else:
        messages = agent.invoke(asked)["messages"]
        assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
        assert messages[-1].text == CONCLUSION
    assert cities == ["Tokyo"]
