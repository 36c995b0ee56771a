"""A few-shot evaluation: a table of questions, accuracy with its uncertainty, kept answers.

`select` weighs the options of a question, so that every answer is one of them and comes with its
probability. All prompts begin with the same solved questions; the engine computes these once.

Each answer is written to a SQLite file as it comes. After Ctrl-C or a crash the same command goes
on where it was, and with a higher --limit it asks what is new. Answers are kept under all that
they depend on: the program below, the model, the settings, the question. Change any of them, and
what depends on it is asked again.
"""

from __future__ import annotations

import argparse
import inspect
import string
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from evaluation.plot import draw
from evaluation.report import print_comparison, print_report, print_runs
from evaluation.results import Answer, Results, ResultsError, Run, in_order
from evaluation.table import Question, TableError, digest, read_table

import palmette as pm
from palmette.errors import EngineStopped

HERE = Path(__file__).resolve().parent
QUESTIONS = HERE / "data" / "quiz.csv"
SOLVED = HERE / "data" / "quiz_solved.csv"
OUTPUT = HERE / "output" / "few_shot_eval"


@pm.function
def ask(s: pm.State, solved: Sequence[Question], question: Question, style: str) -> None:
    for each in solved:
        answers = labels(each, style)
        s += shown(each, style) + answers[each.options.index(each.right)] + "\n\n"
    s += shown(question, style) + pm.select("answer", labels(question, style))


def shown(question: Question, style: str) -> str:
    """The question as it stands in a prompt, up to its answer."""
    lines = [f"Question: {question.text}"]
    if style == "letters":
        options = zip(string.ascii_uppercase, question.options, strict=False)
        lines += [f"{letter}. {option}" for letter, option in options]
    return "\n".join([*lines, "Answer: "])


def labels(question: Question, style: str) -> list[str]:
    """What the model chooses from, one for each option."""
    if style == "letters":
        return list(string.ascii_uppercase[: len(question.options)])
    return list(question.options)


def make_run(model: str, solved: Sequence[Question], style: str, shuffle: int | None) -> Run:
    """All that answers depend on. An option that you add to the program belongs here."""
    program = "".join(inspect.getsource(each) for each in (ask.func, shown, labels))
    return Run(
        {
            "model": model,
            "weights": weights_version(Path(model)),
            "palmette": pm.__version__,
            "program": digest(program),
            "answers": style,
            "shots": len(solved),
            "solved": digest([question.key for question in solved]),
            "shuffle": shuffle,
        }
    )


def weights_version(path: Path) -> str | None:
    """Size and time of a model's files; a known name always stands for the same weights."""
    if not path.exists():
        return None
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return digest([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])


def evaluate(
    backend: pm.Engine,
    run: Run,
    solved: Sequence[Question],
    questions: Sequence[Question],
    results: Results,
    retry_failed: bool = False,
) -> list[Answer]:
    """Ask what `results` has no answer to, and return all answers. A question that fails is kept
    with its error, and the others go on.
    """
    kept = results.answers(run)
    left = [
        question
        for question in questions
        if question.key not in kept or (retry_failed and kept[question.key].has_failed)
    ]
    style, shuffle = run.settings["answers"], run.settings["shuffle"]
    asked = [question.shuffled(shuffle) for question in left]
    states = ask.run_batch_iter(
        [{"question": question} for question in asked],
        solved=[question.shuffled(shuffle) for question in solved],
        style=style,
        backend=backend,
        on_error="return",
        progress=True,
    )
    with closing(states):
        for index, state in states:
            results.add(run, answer_of(left[index], asked[index], style, state))
    return in_order(results.answers(run), questions)


def answer_of(question: Question, asked: Question, style: str, state: Any) -> Answer:
    """What a run of the program came to, with options in place of what they were chosen by."""
    if isinstance(state, Exception):
        cause = state.__cause__ or state
        if isinstance(cause, EngineStopped):
            raise state  # which is no failure of this question
        return Answer(question=question, error=f"{type(cause).__name__}: {cause}")
    meta = state.meta("answer")
    options = dict(zip(labels(asked, style), asked.options, strict=True))
    return Answer(
        question=question,
        chosen=options[state["answer"]],
        probabilities={options[label]: each for label, each in meta["probabilities"].items()},
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    asked.add_argument("--questions", type=Path, default=QUESTIONS, help="a .csv or .jsonl table")
    asked.add_argument("--solved", type=Path, default=SOLVED, help="a table to show solved")
    asked.add_argument("--shots", type=count, metavar="N", help="show only the first N of it")
    asked.add_argument(
        "--answers",
        choices=["text", "letters"],
        default="text",
        help="weigh the options' texts, or list the options and weigh their letters",
    )
    asked.add_argument(
        "--shuffle-options",
        type=int,
        metavar="SEED",
        help="list the options of each question in another order",
    )
    asked.add_argument("--limit", type=count, metavar="N", help="only the first N questions")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FOLDER", help="for answers.sqlite, plots"
    )
    kept.add_argument("--plot", type=Path, metavar="FILE", help="a .png, .svg or .pdf elsewhere")
    again = kept.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with the run (the default)")
    again.add_argument("--fresh", action="store_true", help="drop the run's answers, begin anew")
    again.add_argument("--retry-failed", action="store_true", help="ask again what failed, too")
    looked = parser.add_argument_group("instead of asking").add_mutually_exclusive_group()
    looked.add_argument("--runs", action="store_true", help="list the runs that have answers")
    looked.add_argument(
        "--compare", nargs=2, metavar=("RUN_A", "RUN_B"), help="two of them, question by question"
    )
    return parser


def count(text: str) -> int:
    """A number of things. Raises ValueError if it is negative."""
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def ask_and_report(args: argparse.Namespace, results: Results) -> int:
    """Exit status 1 if a question failed."""
    questions, solved = read_table(args.questions), read_table(args.solved)
    questions, solved = questions[: args.limit], solved[: args.shots]
    run = make_run(args.model, solved, args.answers, args.shuffle_options)
    if args.fresh:
        results.forget(run)
    num_kept = len(in_order(results.answers(run), questions))
    print(f"run {run.id[:8]}: {len(questions)} questions, {num_kept} of them answered before")
    with pm.Engine(args.model) as engine:
        answers = evaluate(engine, run, solved, questions, results, args.retry_failed)
    print_report(run, answers)
    print(f"answers: {results.path}")
    if any(not answer.has_failed for answer in answers):
        path = args.plot or args.output / f"{run.id[:8]}.png"
        draw(answers, path)
        print(f"plot:    {path}")
    return 1 if any(answer.has_failed for answer in answers) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.shuffle_options is not None and args.answers == "text":
        parser.error("--shuffle-options needs --answers letters: texts are weighed, not listed")
    if args.plot is not None and args.plot.suffix not in (".png", ".svg", ".pdf"):
        parser.error("--plot takes a .png, .svg or .pdf file")
    try:
        with Results(args.output / "answers.sqlite") as results:
            if args.compare:
                print_comparison(results, *map(results.find, args.compare))
                return 0
            if args.runs:
                print_runs(results)
                return 0
            return ask_and_report(args, results)
    except (pm.PalmetteError, TableError, ResultsError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\nstopped; what was answered is kept, the same command goes on\n")


if __name__ == "__main__":
    raise SystemExit(main())
