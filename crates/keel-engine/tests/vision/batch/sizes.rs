//! Pictures of any size: shapes of passes, padding, pieces, and the work that a pass leaves.

use super::*;

/// A picture of `h` by `w` patches with made-up values, as the tower reads it.
fn made_up(config: &VisionConfig, (h, w): (usize, usize), name: u8) -> PictureInput {
    let value = |i: usize| ((i * 37 + usize::from(name) * 11) % 255) as f32 / 127.5 - 1.0;
    let values = (0..h * w * config.patch_values()).map(value).collect();
    PictureInput {
        key: [name; 32],
        values: Arc::new(values),
        grid: PatchGrid { t: 1, h, w },
        is_video: false,
    }
}

/// A request that shows such a picture.
fn made_up_request(config: &VisionConfig, id: u64, (h, w): (usize, usize)) -> BatchRequest {
    let rows = config.rows_of(h, w);
    let tokens =
        [vec![5, 6, config.tokens.start], vec![config.tokens.image; rows], vec![config.tokens.end, 9]];
    let tokens = tokens.concat();
    let vision = RequestVision::new(config, &tokens, vec![made_up(config, (h, w), id as u8 + 1)]);
    BatchRequest { vision: Some(vision.expect("the tokens fit")), ..BatchRequest::new(id, tokens, ANSWER) }
}

/// Pictures whose rows see each other are one run if no token is between them. One that fits into no step is refused
/// at once, with the tokens and the limit.
#[test]
fn pictures_side_by_side_that_fit_into_no_step_are_refused() {
    for model in Model::all().filter(|model| model.config.is_bidirectional()) {
        let rows = model.config.run_rows();
        let prefill_step = rows.next_multiple_of(64);
        let count = prefill_step / rows + 1;
        let config = &model.config.tokens;
        let tokens =
            [vec![5, 6, config.start], vec![config.image; count * rows], vec![config.end, 9]].concat();
        let pictures = vec![model.case("b_large").pictures.swap_remove(0); count];
        let request = || model.request(0, &tokens, &pictures);
        let mut small = model.batcher(EngineOptions { prefill_step, ..options() }, exactly());
        let refused = small.submit(request(), Instant::now()).expect_err("it fits into no step").to_string();
        let numbers = format!(
            "of {} tokens must be run in one step, and a step has at most {prefill_step}",
            count * rows
        );
        assert!(refused.contains(&numbers), "{}: {refused}", model.name);
        assert!(small.is_idle());
        let large = EngineOptions { prefill_step: 2 * prefill_step, ..options() };
        assert_eq!(answer(&mut model.batcher(large, exactly()), request()).tokens.len(), ANSWER);
    }
}

/// Grids of every kind, in any order, with and without drafts, with a tower whose passes are cut.
#[test]
fn pictures_of_any_size_leave_nothing_to_be_done_late() {
    for model in Model::all() {
        let side = model.config.block_side();
        let drafts = if model.name.contains("qwen3_5") { 2 } else { 0 };
        for (drafts, piece_tokens) in [(0, 1), (drafts, VisionOptions::WHOLE)] {
            let vision = Some(VisionOptions { patches: 256, pictures: 3, piece_tokens });
            let mut engine = model.engine(EngineOptions { vision, drafts, ..options() });
            engine.make_ready(&mut |_, _, _| ()).expect("memory is planned");
            let mut batcher = Batcher::new(engine, exactly());
            let before = batcher.engine().runtime().ledger().active();
            for (i, (h, w)) in
                [(1, 1), (3, 5), (8, 8), (1, 60), (7, 2), (4, 13), (5, 5), (2, 3)].into_iter().enumerate()
            {
                let grid = if model.config.grid_side() > 0 { (1, 1) } else { (h * side, w * side) };
                let request = match model.config.grid_side() {
                    0 => made_up_request(&model.config, i as u64, grid),
                    _ => model.request(
                        i as u64,
                        &model.case("b_large").tokens,
                        &model.case("b_large").pictures,
                    ),
                };
                let outcome = answer(&mut batcher, request);
                assert_eq!(outcome.tokens.len(), ANSWER, "{} {grid:?}", model.name);
            }
            assert_eq!(batcher.status().late_work, LateWork::default(), "{} {drafts} drafts", model.name);
            let ledger = batcher.engine().runtime().ledger().clone();
            assert_eq!((ledger.active(), ledger.peak()), (before, before), "{}", model.name);
            assert_all_is_back(&mut batcher);
        }
    }
}

/// Neither the padding of a pass nor its cuts change a bit of the features.
#[test]
fn padding_and_cuts_of_a_pass_change_no_bit() {
    for model in Model::all().filter(|model| model.config.grid_side() == 0) {
        let side = model.config.block_side();
        for grid in [(1, 1), (3, 5), (4, 9), (7, 9)] {
            let grid = (grid.0 * side, grid.1 * side);
            let picture = made_up(&model.config, grid, 1);
            let see = |patches: usize, piece_tokens: usize, before: Option<&PictureInput>| {
                let vision = Some(VisionOptions { patches, pictures: 0, piece_tokens });
                let mut engine = model.engine(EngineOptions { vision, ..options() });
                if let Some(before) = before {
                    engine.encode_picture(&before.values, before.grid).expect("it encodes");
                }
                engine.encode_picture(&picture.values, picture.grid).expect("it encodes")
            };
            // A list that ends with the picture's own size pads nothing.
            let expected = see(grid.0 * grid.1, VisionOptions::WHOLE, None);
            let other = made_up(&model.config, (8 * side, 8 * side), 9);
            for (patches, piece_tokens) in [(64 * side * side, VisionOptions::WHOLE), (64 * side * side, 1)] {
                let got = see(patches, piece_tokens, Some(&other));
                assert!(got.levels == expected.levels, "{} {grid:?} of {patches}", model.name);
            }
        }
    }
}

/// Gaps are counted in steps: whatever the size of a picture, an answer gets a token in each step, and a step has one
/// piece of the tower's work.
#[test]
fn a_large_picture_delays_others_by_a_piece_a_step() {
    for model in Model::all() {
        let vision = Some(VisionOptions { patches: 256, pictures: 3, piece_tokens: 1 });
        let mut batcher = model.batcher(EngineOptions { vision, ..options() }, exactly());
        let case = model.case("b_large");
        let expected = answer(&mut model.fresh(), model.request(1, &case.tokens, &case.pictures)).tokens;
        let talker = BatchRequest::new(0, vec![5, 6, 7], 60);
        batcher.submit(talker, Instant::now()).expect("accepted");
        batcher.step(Instant::now());
        batcher.submit(model.request(1, &case.tokens, &case.pictures), Instant::now()).expect("accepted");
        let (mut steps, mut outcomes) = (0, vec![Outcome::default(), Outcome::default()]);
        while batcher.status().pictures.encoded == 0 {
            let events = batcher.step(Instant::now());
            steps += 1;
            assert_eq!(batcher.status().pictures.pieces, steps, "{}: one piece a step", model.name);
            let is_token = |e: &SequenceEvent| e.id == 0 && matches!(e.event, BatchEvent::Token { .. });
            assert!(events.iter().any(is_token), "{}: the answer goes on", model.name);
        }
        assert!(steps > 1, "{}: the pass is cut", model.name);
        while !batcher.is_idle() {
            step(&mut batcher, Instant::now(), &mut outcomes);
        }
        assert!(outcomes[1].tokens == expected, "{}: the cuts change nothing", model.name);
        assert_all_is_back(&mut batcher);
    }
}

/// A picture whose request goes away half seen, while another request waits for the same picture or for another one.
#[test]
fn a_picture_left_half_seen_is_seen_whole_by_the_next() {
    for model in Model::all() {
        let vision = Some(VisionOptions { patches: 256, pictures: 3, piece_tokens: 1 });
        let case = model.case("b_large");
        let other = negative(&case.pictures);
        for pictures in [&case.pictures, &other] {
            let expected = answer(&mut model.fresh(), model.request(1, &case.tokens, pictures)).tokens;
            let mut batcher = model.batcher(EngineOptions { vision, ..options() }, exactly());
            for (id, pictures) in [(0, &case.pictures), (1, pictures)] {
                batcher.submit(model.request(id, &case.tokens, pictures), Instant::now()).expect("accepted");
            }
            batcher.step(Instant::now());
            assert_eq!(batcher.status().pictures.encoded, 0, "{}: it is half seen", model.name);
            batcher.cancel(0);
            let outcome = finish(&mut batcher, 2).swap_remove(1);
            assert!(outcome.error.is_none() && outcome.tokens == expected, "{}", model.name);
            assert_all_is_back(&mut batcher);
        }
    }
}

/// The tower delays answers by one picture a step at most.
#[test]
fn answers_go_on_between_pictures() {
    for model in Model::all() {
        let case = model.case("c_two_images");
        let mut batcher = model.batcher(options(), exactly());
        let talker = BatchRequest { max_tokens: 40, ..BatchRequest::new(0, vec![5, 6, 7], 40) };
        batcher.submit(talker, Instant::now()).expect("accepted");
        batcher.step(Instant::now());
        batcher.submit(model.request(1, &case.tokens, &case.pictures), Instant::now()).expect("accepted");
        let mut encoded = 0;
        while batcher.status().pictures.encoded < case.pictures.len() as u64 {
            let events = batcher.step(Instant::now());
            let now = batcher.status().pictures.encoded;
            assert!(now <= encoded + 1, "{}", model.name);
            encoded = now;
            let is_token = |e: &SequenceEvent| e.id == 0 && matches!(e.event, BatchEvent::Token { .. });
            assert!(events.iter().any(is_token), "{}: the answer goes on", model.name);
        }
        finish(&mut batcher, 2);
        assert_all_is_back(&mut batcher);
    }
}
