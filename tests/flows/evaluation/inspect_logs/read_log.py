"""What Inspect reads in a log: `.venv-inspect/bin/python read_log.py FILE` prints it as JSON."""

import json
import sys

from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries

if __name__ == "__main__":
    log = read_eval_log(sys.argv[1])
    samples = sorted(log.samples or [], key=lambda sample: (sample.id, sample.epoch))
    first = samples[0]
    apart = read_eval_log_sample(sys.argv[1], id=first.id, epoch=first.epoch)
    found = {
        "status": log.status,
        "task": log.eval.task,
        "model": log.eval.model,
        "epochs": log.eval.config.epochs,
        "metadata": log.eval.metadata,
        "metrics": {name: metric.value for name, metric in log.results.scores[0].metrics.items()},
        "samples": [
            {
                "id": sample.id,
                "epoch": sample.epoch,
                "input": sample.input,
                "target": sample.target,
                "response": sample.output.completion,
                "stop": sample.output.stop_reason,
                "tokens": sample.output.usage.output_tokens,
                "scores": {name: score.value for name, score in (sample.scores or {}).items()},
                "error": sample.error and sample.error.message,
                "events": [event.event for event in sample.events],
            }
            for sample in samples
        ],
        "summaries": [[one.id, one.epoch] for one in read_eval_log_sample_summaries(sys.argv[1])],
        "apart": apart.output.completion,
    }
    print(json.dumps(found))
