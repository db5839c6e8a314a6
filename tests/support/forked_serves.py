"""Run ``vllm serve`` several times with one import of vLLM, which takes longer than all that a refused start does.

    python -m tests.support.forked_serves '{"FILE FOR ITS OUTPUT": ["MODEL", "ARGUMENT", ...], ...}'

prints the exit statuses as a JSON object. Each command runs to its end in a fork of this process, one after another.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Run the commands of the first argument."""
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.async_llm
    from vllm.model_executor.models import registry

    # By default vLLM inspects the model's class in a process of its own, which imports all of vLLM once more.
    registry._run_in_subprocess = lambda look: look()
    statuses = {}
    for log_path, arguments in json.loads(sys.argv[1]).items():
        process_id = os.fork()
        if process_id == 0:
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, sys.stdout.fileno())
            os.dup2(log, sys.stderr.fileno())
            sys.argv = ["vllm", "serve", *arguments]
            sys.exit(vllm.entrypoints.cli.main.main())
        statuses[log_path] = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
