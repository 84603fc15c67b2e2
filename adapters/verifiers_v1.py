"""Environments of verifiers, version 1: --environment adapters/verifiers_v1.py:Verifiers.

Each row names a taskset that the other Python can import, and one of its tasks: {"prompt": "", "taskset": "echo-v1",
"index": 0, "options": {}, "max_turns": 4}. Give --max_turns again in the row: then it is the environment that ends, and
scores what there is. The reward is the environment's. One agent, and text alone: no tools of its own.

An environment of verifiers asks for the model by itself. So it runs in a thread, with a harness and a server for the
model that hand each question on to ``turn`` and wait for the answer.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import threading
import types

from elsewhere import Remote, serve


class Play:
    """In the other Python: one episode."""

    def reset(self, row: dict) -> str:
        """Begin; what the model is asked first."""
        self.row = row
        self.questions = queue.Queue()  # to the model; None: it is over; an exception: it has failed
        self.answers = queue.Queue()  # of the model; None: there is none, and the episode must end
        self.over = False
        self.reward = 0.0
        threading.Thread(target=lambda: asyncio.run(self.play()), daemon=True).start()
        return self.asked()

    def asked(self) -> str | None:
        """Return the next question to the model, or None at the end. Raises the exception of a failed environment."""
        found = self.questions.get()
        self.over = not isinstance(found, str)
        if isinstance(found, Exception):
            raise found
        return found

    def turn(self, text: str) -> str | None:
        """Answer."""
        self.answers.put(text)
        return self.asked()

    def get_reward(self) -> float:
        """Return the episode's reward. An environment that still asks gets no answer, so that it can clean up."""
        if not self.over:
            self.answers.put(None)
            self.questions.get()
        return self.reward

    async def play(self) -> None:
        """Run the environment from its first question to its reward."""
        try:
            runner = web.AppRunner(app := web.Application())
            app.router.add_post("/v1/chat/completions", self.complete)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
            env = vf.load_environment(settings(self.row))
            task = next(itertools.islice(env.taskset.load(), self.row.get("index", 0), None))
            async with env.serving():
                model = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=url))
                episode = await env.run_episode(task, model)
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            if errors:
                raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
            self.reward = float(sum(trace.reward for trace in episode.traces))
            self.questions.put(None)
        except Exception as error:
            self.questions.put(error)

    async def complete(self, request) -> web.Response:
        """Act as a model server: pass the new part of the conversation to the run, and wait for its response."""
        messages = (await request.json())["messages"]
        said = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        new = messages[said[-1] + 1 if said else 0 :]
        self.questions.put("\n".join(text_of(message["content"]) for message in new))
        text = await asyncio.to_thread(self.answers.get)
        if text is None:
            return web.json_response({"error": {"message": "the episode is over"}}, status=400)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        whole = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "usage": usage}
        return web.json_response({**whole, "choices": [choice]})


def text_of(content) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def settings(row: dict):
    """Return the configuration of the environment that a row names, with the harness "turns" for its agent."""
    raw = {"taskset": {"id": row["taskset"], **row.get("options", {})}, "id": row.get("env", "")}
    kind = loaders.env_config_type(row["taskset"], raw["id"])
    agents = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    if len(agents) != 1:
        raise ValueError(f"{row['taskset']} has {len(agents)} agents ({', '.join(agents)}), and there is one model")
    agent = {"harness": {"id": "turns"}, "runtime": {"type": "subprocess"}, "max_turns": row.get("max_turns")}
    return loaders.resolve_env_config({**raw, agents[0]: agent})


def load() -> None:
    """Import the library; the harness is a module that its loader finds."""
    global httpx, loaders, vf, web
    import httpx
    import verifiers.v1 as vf
    from aiohttp import web
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.utils import loaders

    class Turns(vf.Harness[vf.HarnessConfig]):
        """One answer of the model for each segment of the conversation, asked for in this process."""

        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += map(message_to_wire, prompt or [])
            async with httpx.AsyncClient(timeout=None) as client:
                headers = {"Authorization": f"Bearer {secret}"}
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", headers=headers, json=body)
            return vf.ProgramResult(int(answer.is_error), "", answer.text)

    module = types.ModuleType("turns")
    module.Turns, module.__all__ = Turns, ["Turns"]
    sys.modules["turns"] = module


if __name__ == "__main__":
    serve(load, Play)
else:

    class Verifiers(Remote, file=__file__, variable="VERIFIERS_PYTHON", needs="verifiers==0.4.0"):
        """Here."""
