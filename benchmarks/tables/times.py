"""Markdown tables of what is timed: steps, overlap, checkpoints."""

from __future__ import annotations

import itertools

from benchmarks.tables.markdown import Result, for_readers, per_repeat, quartiles, span, table, with_spread

OVERLAP = ", overlap"  # as in step_time.py


def step_time(result: Result) -> str:
    """Median and quartiles of step times, and of the ratios to the baseline of the same repeat; counts beside them."""
    baseline = result["seconds"][result["baseline"]]
    heads = ("", "step (ms)", "quartiles", "ratio to baseline", "quartiles", "target")
    rows = []
    for name, seconds in result["seconds"].items():
        cells = [for_readers(name)]
        for values, digits in (([1e3 * value for value in seconds], 1), (per_repeat(seconds, baseline), 3)):
            low, middle, high = quartiles(values)
            cells += [f"{middle:.{digits}f}", f"{low:.{digits}f} to {high:.{digits}f}"]
        rows.append([*cells, _target(result, name), *_work_cells(result, name)])
    caption = f"{', '.join(_facts(result))}; {len(baseline)} repeats; counts are those of the rank with the most"
    return f"{caption}\n\n" + table([*heads, "GFLOPs", "ratio", "MB sent", "ratio"], rows)


def _target(result: Result, name: str) -> str:
    target = result["targets"][name]
    return "" if target is None else f"{target:g}"


def _work_cells(result: Result, name: str) -> list[str]:
    """The largest rank's FLOPs and bytes sent with their ratios to the baseline's."""
    cells = []
    for kind, scale in (("flops", 1e9), ("sent_bytes", 1e6)):
        cells += [f"{_most(result, name, kind) / scale:.2f}", f"{_work_ratio(result, name, kind):.3f}"]
    return cells


def _most(result: Result, name: str, kind: str) -> int:
    return max(rank[kind] for rank in result["work"][name])


def _work_ratio(result: Result, name: str, kind: str) -> float:
    return _most(result, name, kind) / _most(result, result["baseline"], kind)


def _facts(result: Result) -> list[str]:
    """What was run."""
    arguments = result["arguments"]
    facts = [
        f"{result['ranks']} ranks",
        arguments.get("optimizer", "AdamW").replace("AdamW", ""),
        f"{result['link']} between them" if result.get("link") else "",
        f"{result['model']['num_parameters'] / 1e6:.1f}M parameters",
        f"batch {arguments['micro_batch']} x {result['sequence_length']} per rank",
        f"{arguments['accumulation']} micro-steps" if arguments["accumulation"] > 1 else "",
        f"buckets of {arguments['bucket'] / 1e6:g}M elements",
    ]
    return [fact for fact in facts if fact]


def _columns(results: tuple[Result, ...]) -> tuple[str, list[str]]:
    """A caption of what all runs have in common, and for each the head of its column: what is its own."""
    facts = [_facts(result) for result in results]
    common = [fact for fact in facts[0] if all(fact in others for others in facts)]
    heads = [", ".join(fact for fact in own if fact not in common) for own in facts]
    return ", ".join(common), [head or "all ranks" for head in heads]


def step_ratios(*results: Result) -> str:
    """Step times as shares of the baseline's, a column for each run; and the counts' ratios, lowest and highest."""
    caption, runs = _columns(results)
    rows = []
    for name in results[0]["targets"]:
        cells = [for_readers(name), _target(results[0], name)]
        cells += [_share(result, name) for result in results]
        for kind in ("flops", "sent_bytes"):
            cells.append(span([_work_ratio(result, name, kind) for result in results]))
        rows.append(cells)
    return f"{caption}:\n\n" + table(["", "target", *runs, "FLOPs", "bytes sent"], rows)


def _share(result: Result, name: str) -> str:
    if name == result["baseline"]:
        return "1"
    return with_spread(per_repeat(result["seconds"][name], result["seconds"][result["baseline"]]))


def overlap(*results: Result) -> str:
    """Step time with overlap_comm as a share of that without, in the same repeat: median (quartiles). Over a link both
    as shares of plain DeepSpeed's too, with and without it alike; DDP, which always overlaps, beside those with it."""
    caption, runs = _columns(results)
    shown = [{for_readers(name): seconds for name, seconds in result["seconds"].items()} for result in results]
    baselines = [for_readers(result["baseline"]) for result in results]
    linked = [bool(result.get("link")) for result in results]
    heads = ["with overlap / without"]
    for run, baseline, is_linked in zip(runs, baselines, linked, strict=True):
        heads += [run, *[f"share of {baseline}'s, without", "with"] * is_linked]
    rows = []
    for name in shown[0]:
        if name + OVERLAP not in shown[0]:
            continue
        cells = [name]
        for seconds, baseline, is_linked in zip(shown, baselines, linked, strict=True):
            cells.append(with_spread(per_repeat(seconds[name + OVERLAP], seconds[name])))
            ways = ("", OVERLAP) if is_linked else ()
            cells += [_share_of_step(seconds, name + way, baseline + way) for way in ways]
        rows.append(cells)
    if any("DDP" in seconds for seconds in shown):
        rows.append(["DDP"])
        for seconds, baseline, is_linked in zip(shown, baselines, linked, strict=True):
            shares = ["", _share_of_step(seconds, "DDP", baseline + OVERLAP) if "DDP" in seconds else ""]
            rows[-1] += ["", *shares * is_linked]
    return f"{caption}:\n\n" + table(heads, rows)


def checkpoint_time(result: Result) -> str:
    """Median (quartiles) in seconds, and the ratio to the baseline of the same repeat; sizes on the disk."""
    baseline = result["seconds"][result["baseline"]]
    measured = dict.fromkeys(itertools.chain.from_iterable(result["seconds"].values()))
    rows = []
    for name, times in result["seconds"].items():
        cells = [_against(times[what], baseline.get(what)) if what in times else "" for what in measured]
        rows.append([for_readers(name), *cells, f"{result['bytes'][name] / 1e6:.0f}"])
    model = result["arguments"]["model"].removesuffix(".json")
    caption = f"{result['ranks']} ranks, model {model}, {result['arguments']['precision']}; seconds:"
    return f"{caption}\n\n" + table(["", *measured, "MB"], rows)


def _against(seconds: list[float], baseline: list[float] | None) -> str:
    if baseline is None or baseline is seconds:
        return with_spread(seconds)
    _, ratio, _ = quartiles(per_repeat(seconds, baseline))
    return f"{with_spread(seconds)}, {ratio:.2f}x"


def host_time(result: Result) -> str:
    """Milliseconds of the host per step, and what they follow."""
    rows = []
    for row in result["results"]:
        name = f"{row['model']}, {row['strategy']}, {row['num_ranks']} ranks, k = {row['num_subnetworks']}"
        milliseconds = [1e3 * second for second in row["seconds"]]
        counts = [row["num_holder_sets"], row["num_buckets"], row["num_fragments"], row["num_collectives"]]
        cells = [with_spread(milliseconds), f"{row['target']:g}", f"{1e3 * row['first_seconds']:.0f}"]
        rows.append([name, *cells, *map(str, counts), str(sum(row["num_kernels"].values()))])
    heads = ("", "ms", "target", "first step", "holder sets", "buckets", "fragments", "collectives", "launches")
    return table(heads, rows)


def between_nodes(*results: Result) -> str:
    """Spectral gaps, bytes that crossed the link in a step, by its own counter, and step times over each link; shares
    of plain ZeRO's at the same stage."""
    first = results[0]
    rows, baseline = [], ""
    for name in first["seconds"]:
        baseline = name if name.startswith("zero") else baseline
        crossed, base = (first["link_bytes"][which][0] for which in (name, baseline))
        gap = first["spectral_gaps"][name]
        cells = ["" if gap is None else f"{gap:.3f}", f"{crossed / 1e6:.1f}", f"{crossed / base:.3f}"]
        cells += [_share_of_step(result["seconds"], name, baseline) for result in results]
        rows.append([for_readers(name), *cells])
    facts = [f"2 nodes of {first['ranks_per_node']} ranks", *_facts(first)[2:]]
    heads = ("", "spectral gap", "MB each way", "share", *(f"step time, {result['link']}" for result in results))
    return f"{', '.join(facts)}; shares of ZeRO's:\n\n" + table(heads, rows)


def _share_of_step(seconds: dict[str, list[float]], name: str, baseline: str) -> str:
    return "1" if name == baseline else with_spread(per_repeat(seconds[name], seconds[baseline]))
