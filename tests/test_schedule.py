"""The notation of schedules, its errors, and what each constructor changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe.ablations.kinds import KINDS, controls, schedules
from depthprobe.ablations.schedule import (
    Schedule,
    Stage,
    Unit,
    attention_first,
    merge,
    parallel_sublayers,
    parse,
    partition,
    repeat,
    reverse,
    shuffle,
    skip,
    swap,
    unmodified,
)
from depthprobe.errors import UsageError

TABLE_KINDS = {"skip", "merge", "swap", "repeat", "reverse", "shuffle", "custom", "control"}

units = st.builds(Unit, st.integers(0, 9), st.sampled_from(["", "", "a", "m"]))
stages = st.lists(units, min_size=1, max_size=4, unique=True).map(tuple)


def chain(*layers: int) -> tuple[Stage, ...]:
    return tuple((Unit(layer),) for layer in layers)


def order(schedule: Schedule) -> list[int]:
    assert all(len(stage) == 1 and not stage[0].part for stage in schedule.stages)
    return [stage[0].layer for stage in schedule.stages]


class TestNotation:
    @settings(max_examples=400, deadline=None)
    @given(st.lists(stages, min_size=1, max_size=14).map(tuple))
    def test_what_is_printed_is_read_back(self, made: tuple[Stage, ...]) -> None:
        assert parse(str(Schedule(made))).stages == made

    @settings(max_examples=200, deadline=None)
    @given(st.lists(stages, min_size=1, max_size=8).map(tuple), st.data())
    def test_spaces_between_tokens_do_not_matter(self, made: tuple[Stage, ...], data: st.DataObject) -> None:
        text = str(Schedule(made))
        loose = "".join(
            f"{sign}{data.draw(st.sampled_from(['', ' ', '   ']))}" if sign in "(+-) " else sign for sign in text
        )
        assert parse(f"  {loose} ").stages == made

    @settings(max_examples=300, deadline=None)
    @given(st.text("0123456789am-+() xé٣", max_size=14))
    def test_any_text_is_read_or_refused_in_one_line(self, text: str) -> None:
        try:
            found = parse(text)
        except UsageError as error:
            message = str(error)
        else:
            assert parse(str(found)).stages == found.stages
            return
        assert "\n" not in message
        assert 1 <= pointed(message) <= len(text) + 1 or not text.strip()

    @pytest.mark.parametrize(
        ("made", "text"),
        [
            (merge(12, [4, 5]), "0-3 (4+5) 6-11"),
            (skip(12, [4]), "0-3 5-11"),
            (swap(12, 4, 5), "0-3 5 4 6-11"),
            (repeat(12, 4), "0-4 4 5-11"),
            (attention_first(12, [4, 5]), "0-3 (4a+5a) (4m+5m) 6-11"),
            (parallel_sublayers(6, [4]), "0-3 (4a+4m) 5"),
            (unmodified(12), "0-11"),
            (unmodified(1), "0"),
            (skip(6, [2], "a"), "0-1 2m 3-5"),
            (skip(6, [2], "m"), "0-1 2a 3-5"),
            (merge(6, [1, 3]), "0 (1+3) 2 4-5"),
            (merge(6, [2, 3], part="a"), "0-1 (2a+3a) 2m 3m 4-5"),
            (merge(6, [2, 3], part="m"), "0-1 2a (2m+3m) 3a 4-5"),
        ],
    )
    def test_examples_print_as_they_are_documented(self, made: Schedule, text: str) -> None:
        assert str(made) == made.label == text
        assert parse(text).stages == made.stages

    def test_the_documented_meaning_of_each_example(self) -> None:
        assert parse("0-3 (4+5) 6-11").stages == (*chain(0, 1, 2, 3), (Unit(4), Unit(5)), *chain(6, 7, 8, 9, 10, 11))
        assert parse("0-1 3").stages == chain(0, 1, 3)
        assert parse("(4a+5a) (4m+5m)").stages == (
            (Unit(4, "a"), Unit(5, "a")),
            (Unit(4, "m"), Unit(5, "m")),
        )
        assert parse("7-7").stages == chain(7)

    def test_reading_keeps_the_combination(self) -> None:
        assert parse("(0+1)").combine == "sum"
        assert parse("(0+1)", "mean").combine == "mean"
        assert parse("(0+1)").kind == "custom"


def pointed(message: str) -> int:
    found = re.search(r"at character (\d+)", message)
    return int(found.group(1)) if found else 0


class TestRefusals:
    # The number is where a reader would put the finger, counted from 1.
    @pytest.mark.parametrize(
        ("text", "place"),
        [
            ("0-3 (4+5", 9),
            ("0-3 4+5)", 6),
            ("0-3 4)", 6),
            ("0 (1+) 2", 6),
            ("0 (1+", 6),
            ("(", 2),
            ("()", 2),
            ("((0+1))", 2),
            ("(0 1)", 4),
            ("(0-1)", 3),
            ("0 b 2", 3),
            ("zero", 1),
            ("0,1", 2),
            ("0-3 ~4", 5),
            ("4A", 2),
            ("4am", 3),
            ("4 a", 3),
            ("a", 1),
            ("-3", 1),
            ("3-", 3),
            ("1-2-3", 4),
            ("0--3", 3),
            ("+1", 1),
            ("0 + 1", 3),
            ("0.5", 2),
            ("3-1", 1),
            ("0 3-1", 3),
            ("4a-5", 1),
            ("0 4-5m", 3),
            ("(4+4)", 4),
            ("0 (4+4) 5", 6),
            ("0 (4a+5a+4a)   5", 10),
            ("0-1 ٣", 5),
            ("²", 1),
            ("0-３", 3),
        ],
    )
    def test_point_at_the_character(self, text: str, place: int) -> None:
        with pytest.raises(UsageError) as caught:
            parse(text)
        assert pointed(str(caught.value)) == place, str(caught.value)
        assert re.sub(r"\s+", " ", repr(text)) in str(caught.value)
        assert "expected" in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("text", ["0-99999999999", "123456789012345678901234567890"])
    def test_a_block_that_no_model_has_costs_nothing(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse(text).check(12)
        assert "99999999999" in str(caught.value) or "1234567890" in str(caught.value)

    def test_empty(self) -> None:
        for text in ("", "   "):
            with pytest.raises(UsageError, match="empty"):
                parse(text).check(3)

    @pytest.mark.parametrize(
        ("made", "blocks", "message"),
        [
            (parse("0-3"), 3, "block 3"),
            (parse("0 (1+7)"), 3, "block 7"),
            (parse("0 9a"), 3, "block 9"),
            (Schedule(((Unit(-1),),)), 3, "block -1"),
            (parse("0 (1+2a)"), 3, r"\(1\+2a\) mixes a block with a sublayer"),
            (parse("(0a+1a)", "weights"), 3, "averaged weights"),
            (replace(parse("(0+1)"), combine="product"), 3, "'product'"),
            (Schedule(((),)), 3, "empty"),
            (Schedule(((Unit(1), Unit(1)),)), 3, "twice"),
        ],
    )
    def test_what_does_not_fit_a_model(self, made: Schedule, blocks: int, message: str) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            made.check(blocks)
        assert "\n" not in str(caught.value)

    def test_what_fits_is_given_back(self) -> None:
        made = parse("0 (1a+2a) 2m 1m", "branch-sum")
        assert made.check(3) is made
        assert parse("(0+1)", "weights").check(2).combine == "weights"

    @pytest.mark.parametrize(
        "make",
        [
            lambda: skip(4, [4]),
            lambda: skip(4, [-1]),
            lambda: merge(4, [3, 4]),
            lambda: merge(4, [2, 9], part="a"),
            lambda: swap(4, -1, 0),
            lambda: swap(4, 3, 4),
            lambda: repeat(4, 4),
            lambda: attention_first(4, [3, 4]),
            lambda: parallel_sublayers(4, [4]),
            lambda: reverse(4, 2, 9),
            lambda: shuffle(4, -2, 2, 0),
            lambda: merge(4, []),
            lambda: attention_first(4, [0, 2]),
        ],
    )
    def test_constructors_do_not_make_up_a_schedule_for_a_layer_that_is_not_there(
        self, make: Callable[[], Schedule]
    ) -> None:
        with pytest.raises(UsageError) as caught:
            make().check(4)
        assert "\n" not in str(caught.value)


class TestConstructors:
    def test_skip(self) -> None:
        assert order(skip(5, [1, 3])) == [0, 2, 4]
        assert order(skip(5, [3, 1, 1])) == [0, 2, 4]
        assert skip(5, [1, 3]).changed == (1, 3)
        assert skip(3, [1], "a").stages == ((Unit(0),), (Unit(1, "m"),), (Unit(2),))
        assert skip(3, [1], "m").stages == ((Unit(0),), (Unit(1, "a"),), (Unit(2),))

    def test_merge(self) -> None:
        assert merge(5, [2, 1, 3]).stages == ((Unit(0),), (Unit(1), Unit(2), Unit(3)), (Unit(4),))
        assert merge(5, [1, 4]).stages == ((Unit(0),), (Unit(1), Unit(4)), (Unit(2),), (Unit(3),))
        assert merge(5, [1, 2], "mean").combine == "mean"
        assert merge(5, [1, 2]).changed == (1, 2)

    def test_swap_repeat_reverse(self) -> None:
        assert order(swap(5, 1, 2)) == [0, 2, 1, 3, 4]
        assert order(swap(5, 0, 4)) == [4, 1, 2, 3, 0]
        assert order(repeat(4, 2)) == [0, 1, 2, 2, 3]
        assert order(repeat(4, 0, times=3)) == [0, 0, 0, 1, 2, 3]
        assert order(reverse(6, 1, 5)) == [0, 4, 3, 2, 1, 5]

    def test_shuffle_is_seeded(self) -> None:
        made = [shuffle(20, 2, 18, seed) for seed in range(6)]
        assert [str(shuffle(20, 2, 18, seed)) for seed in range(6)] == list(map(str, made))
        assert len({str(schedule) for schedule in made}) == 6
        for schedule in made:
            assert order(schedule)[:2] == [0, 1]
            assert order(schedule)[-2:] == [18, 19]
            assert sorted(order(schedule)) == list(range(20))
            assert schedule.changed == tuple(range(2, 18))

    def test_partition(self) -> None:
        assert partition([[0], [1, 2], [], [4]]).stages == ((Unit(0),), (Unit(1), Unit(2)), (Unit(4),))
        assert partition([[0], [1, 2]], "mean").combine == "mean"

    def test_parallel_sublayers(self) -> None:
        made = parallel_sublayers(3, [0, 2])
        assert made.stages == ((Unit(0, "a"), Unit(0, "m")), (Unit(1),), (Unit(2, "a"), Unit(2, "m")))

    def test_sublayer_merges_keep_every_other_unit_in_order(self) -> None:
        for part, other in (("a", "m"), ("m", "a")):
            made = merge(6, [1, 3], part=part)
            flat = [unit for stage in made.stages for unit in stage]
            pieces = [[unit] if unit.part else [Unit(unit.layer, "a"), Unit(unit.layer, "m")] for unit in flat]
            whole = [unit for piece in pieces for unit in piece]
            assert sorted(whole) == sorted(Unit(i, p) for i in range(6) for p in ("a", "m")), "each unit once"
            assert (Unit(1, part), Unit(3, part)) in made.stages
            rest = [u for u in whole if u.part == other]
            assert rest == sorted(rest), "the others keep their order"

    def test_all_layers_of_a_model_can_be_one_stage(self) -> None:
        assert merge(3, range(3)).stages == ((Unit(0), Unit(1), Unit(2)),)


class TestProperties:
    @pytest.mark.parametrize(
        ("made", "unit"),
        [
            (unmodified(4), "block"),
            (skip(4, [1]), "block"),
            (merge(4, [1, 2]), "block"),
            (skip(4, [1], "a"), "attention"),
            (skip(4, [1], "m"), "mlp"),
            (merge(4, [1, 2], part="a"), "attention"),
            (merge(4, [1, 2], part="m"), "mlp"),
            (attention_first(4, [1, 2]), "sublayer"),
            (parallel_sublayers(4, [1]), "sublayer"),
        ],
    )
    def test_unit_is_what_was_changed(self, made: Schedule, unit: str) -> None:
        assert made.unit == unit

    def test_a_merge_knows_that_it_is_one(self) -> None:
        assert merge(4, [1, 2]).merges
        assert not skip(4, [1]).merges
        assert not skip(4, [1]).needs_branches
        assert skip(4, [1], "a").needs_branches
        assert parse("(0a+1a)", "branch-sum").needs_branches

    def test_controls_that_are_no_schedules_say_so(self) -> None:
        noise = [made for made in controls(4) if "random vector" in made.label]
        assert [made.changed for made in noise] == [(0, 1), (1, 2), (2, 3)]
        assert "averaged weights" in merge(4, [1, 2], "weights").label
        assert len({made.label for made in controls(8)}) == len(controls(8))

    def test_every_kind_has_its_place_in_the_tables(self) -> None:
        made = schedules(6, KINDS) + controls(6) + [unmodified(6), parse("0-2"), partition([[0, 1], [2]])]
        assert {schedule.kind for schedule in made} <= TABLE_KINDS
        assert {schedule.kind for schedule in made} >= TABLE_KINDS - {"custom"}


class TestKinds:
    def test_one_schedule_for_every_place(self) -> None:
        count = {kind: len(schedules(6, (kind,), span=3)) for kind in KINDS}
        assert count == {
            "skip": 6,
            "merge": 4,
            "swap": 5,
            "repeat": 6,
            "reverse": 4,
            "shuffle": 4,
            "attention-first": 4,
            "parallel": 6,
        }
        for kind in KINDS:
            for made in schedules(6, (kind,)):
                made.check(6)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kinds": ("skip", "drop")}, "'drop'"),
            ({"unit": "head"}, "head"),
            ({"span": 1}, "--span 1"),
            ({"span": 7}, "--span 7"),
            ({"kinds": ("swap",), "unit": "mlp"}, "swap was asked for --unit mlp"),
        ],
    )
    def test_wrong_requests(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            schedules(6, **options)

    @pytest.mark.parametrize("blocks", [1, 2, 3, 7])
    def test_controls_cover_what_a_merge_is_judged_against(self, blocks: int) -> None:
        made = controls(blocks)
        for schedule in made:
            schedule.check(blocks)
        texts = {str(schedule) for schedule in made}
        pairs = [(i, i + 1) for i in range(blocks - 1)]
        assert {str(swap(blocks, *pair)) for pair in pairs} <= texts
        if blocks > 2:
            assert {str(skip(blocks, [i])) for i in range(blocks)} <= texts
            assert {str(skip(blocks, pair)) for pair in pairs} <= texts
            assert {str(merge(blocks, [i, i + 2])) for i in range(blocks - 2)} <= texts
