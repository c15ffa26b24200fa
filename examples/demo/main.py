"""`make demo`: from the flags to the files."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchweld_cli import Parser, guarded

if TYPE_CHECKING:
    from demo.options import Options
    from demo.report import Results

_PACKAGES = ("transformers", "tokenizers", "rich", "matplotlib")
_GPU_COMPILE_SECONDS = 120.0
_CPU_COMPILE_SECONDS = 45.0
_CPU_SECONDS = 160.0


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a language model with torchweld's ops and without.

    Args:
        argv: Flags; `sys.argv` by default.

    Returns:
        0; 1 when a check failed or something is missing; 2 for bad input; 130 after Ctrl-C.
    """
    return guarded("demo", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    from demo.options import UsageError, add_arguments, resolve

    parser = Parser(
        prog="demo",
        description="Train a language model on real text, with torchweld's ops and without.",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    from torchweld import _library

    # Nothing may be fetched; transformers reads these when it is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Without a GPU, a CUDA build of torch warns in the profiler and in torch.compile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        options = resolve(args)
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            return _fail(
                f"{', '.join(missing)} must be installed; use make demo",
                1,
            )
        if not _library.is_available():
            return _fail(str(_library.unavailable_reason()), 1)
        return _Demo(options).run()
    except UsageError as error:
        return _fail(str(error), 2)
    except FloatingPointError as error:
        return _fail(str(error), 1)
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        return _fail("the memory was not enough; use a smaller --batch, --context or --dim", 1)


def _out_of_memory(error: BaseException) -> bool:
    import torch

    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def _fail(sentence: str, code: int) -> int:
    print(f"demo: {sentence}", file=sys.stderr)
    return code


class _Demo:
    def __init__(self, options: Options) -> None:
        from rich.console import Console

        from demo.report import Results

        self.options = options
        self.console = Console()
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.results: Results = Results(options, started)
        self.begin = time.monotonic()

    def run(self) -> int:
        try:
            self._measure()
        except KeyboardInterrupt:
            with _no_interrupt():
                return self._interrupted()
        except OSError:  # stdout is full or gone; the measurements are kept
            with _no_interrupt():
                if self._measured():
                    self.results.interrupted = True
                    self._write()
            raise
        with _no_interrupt():
            code = self._write()
        failed = [name for name, passed in self.results.checks().items() if passed is False]
        if failed:
            return _fail(f"failed: {', '.join(failed)}", 1)
        return code

    def _measure(self) -> None:
        from demo.report import print_generation, print_ops, print_training

        results = self.results
        with self._section("set-up"):
            pair, tokens = self._set_up()
        with self._section("training"):
            self._train(pair, tokens)
        print_training(self.console, results.training)
        with self._section("generation"):
            self._generate(pair, tokens)
        print_generation(self.console, results.generation)
        config = pair.config
        del pair
        with self._section("ops"):
            self._ops(config)
        print_ops(self.console, results.ops)

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.results.seconds[name] = time.monotonic() - start
            self.results.seconds["total"] = time.monotonic() - self.begin

    def _set_up(self) -> tuple[Any, Any]:
        from demo.text import read_text

        options, results, console = self.options, self.results, self.console
        text = read_text(options.text)
        console.print(f"[bold]Text[/]    {text.source}, {text.size / 1e6:.1f} MB", highlight=False)
        with console.status("Loading transformers"):
            import transformers

            from demo.model import make_pair, make_tokens, read_config

            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()
            config = read_config(options)
        with console.status("Cutting the text into tokens"):
            tokens = make_tokens(options, text, config)
        console.print(
            f"[bold]Tokens[/]  vocabulary of {tokens.vocab:,} ({tokens.origin}), "
            f"{tokens.ids.numel():,} tokens encoded",
            highlight=False,
        )
        results.text = {
            "source": text.source,
            "bytes": text.size,
            "documents": len(text.documents),
            "tokenizer": tokens.origin,
            "vocab": tokens.vocab,
            "tokens": tokens.ids.numel(),
        }
        with console.status("Building two models and fusing one"):
            pair = make_pair(options, tokens, config)
        config = pair.config
        results.model = {
            "title": pair.kind.title,
            "class": type(pair.stock).__name__,
            "parameters": pair.parameters,
            "layers": config.num_hidden_layers,
            "dim": config.hidden_size,
            "heads": config.num_attention_heads,
            "context": options.context,
            "from": "random weights" if options.checkpoint is None else "checkpoint",
        }
        results.fuse = pair.report.to_dict()
        console.print(
            f"[bold]Model[/]   {pair.kind.title}, {pair.parameters / 1e6:.1f} M parameters: "
            f"{config.num_hidden_layers} layers, dim {config.hidden_size}, "
            f"{config.num_attention_heads} heads; "
            f"batch {options.batch} x {options.context}, {options.dtype}, {options.device}",
            highlight=False,
        )
        console.print(str(pair.report), highlight=False, markup=False)
        return pair, tokens

    def _train(self, pair: Any, tokens: Any) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        from demo.train import Trainer

        console = self.console
        trainer = Trainer(self.options, pair, tokens)
        training = self.results.training = trainer.result
        with console.status("Compiling" if self.options.compile else "Warming up"):
            trainer.warm_up()
        columns = (
            SpinnerColumn(),
            TextColumn("Training both models"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        every = max(1, training.planned // 5)
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("train", total=training.planned, loss="-")
            for step in trainer.steps():
                losses = [training.variants[n].losses[-1] for n in ("stock", "fused")]
                shown = f"{losses[0]:.3f} / {losses[1]:.3f}"
                progress.update(task, completed=step, loss=shown)
                # A log file shows no bar.
                milestone = step in (1, training.planned) or step % every == 0
                if milestone and not console.is_terminal:
                    console.print(f"step {step}/{training.planned}  loss stock / fused {shown}")
        if training.note:
            console.print(f"[yellow]{training.note}[/]", highlight=False)

    def _generate(self, pair: Any, tokens: Any) -> None:
        from demo.generate import Generation, generate

        result = self.results.generation = Generation()
        with self.console.status("Generating") as status:
            generate(
                self.options,
                pair,
                tokens,
                result,
                lambda what: status.update(f"Generating: {what}"),
            )

    def _ops(self, config: Any) -> None:
        from demo.optable import OpTable, measure

        table = self.results.ops = OpTable()
        with self.console.status("Measuring the ops") as status:
            measure(
                self.options,
                config.num_attention_heads,
                config.hidden_size,
                table,
                self._compile_seconds(),
                lambda what: status.update(f"Measuring {what}"),
            )

    def _compile_seconds(self) -> float:
        if self.options.device.type == "cuda":
            return _GPU_COMPILE_SECONDS
        # The rest of the run's time: torch.compile is the one step that can be left out.
        return min(_CPU_COMPILE_SECONDS, _CPU_SECONDS - (time.monotonic() - self.begin))

    def _write(self) -> int:
        from demo.picture import draw
        from demo.report import write

        self.results.seconds["total"] = time.monotonic() - self.begin
        try:
            paths = write(self.results, draw(self.results))
        except OSError as error:
            return _fail(f"--out {self.options.out} can't be written: {error.strerror}", 2)
        names = " and ".join(str(path) for path in paths)
        self.console.print(
            f"\nWrote {names} after {self.results.seconds['total']:.0f} s.", highlight=False
        )
        return 0

    def _measured(self) -> bool:
        training = self.results.training
        return training is not None and training.steps > 0

    def _interrupted(self) -> int:
        if not self._measured():
            _fail("interrupted before a training step was measured; nothing was written", 130)
            return 130
        from demo.report import print_training

        self.results.interrupted = True
        self._write()  # before output that may fail to be printed
        print_training(self.console, self.results.training)
        _fail("interrupted; what was measured is kept", 130)
        return 130


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """A second Ctrl-C must not stop the writing."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
