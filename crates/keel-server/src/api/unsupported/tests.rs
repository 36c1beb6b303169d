use super::*;

fn refused(body: Value) -> Option<&'static str> {
    check(body.as_object().expect("an object")).err().and_then(|error| error.field())
}

#[test]
fn what_changes_the_answer_is_refused_and_what_does_not_is_not() {
    assert_eq!(refused(json!({"lora": "x"})), Some("lora"));
    assert_eq!(refused(json!({"suffix": "}"})), Some("suffix"));
    assert_eq!(refused(json!({"modalities": ["text", "audio"]})), Some("modalities"));
    assert_eq!(refused(json!({"best_of": 4, "user": "me"})), Some("best_of"));
    assert_eq!(refused(json!({"prompt_logprobs": 0})), Some("prompt_logprobs"));
    for field in ["repeat_penalty", "n_predict", "max_new_tokens"] {
        assert_eq!(refused(json!({field: 2})), Some(field));
    }
    for fine in [
        json!({}),
        json!({"user": "me", "metadata": {"a": 1}, "store": false, "service_tier": "auto"}),
        json!({"suffix": null, "lora": "", "modalities": ["text"], "functions": [], "best_of": 1.0, "typical_p": 1.0,
            "repeat_penalty": 1.0}),
    ] {
        assert_eq!(refused(fine.clone()), None, "{fine}");
    }
}

type Check = fn(&Map<String, Value>) -> Result<()>;

const APIS: [Check; 4] = [check_chat, check_completion, check_response, check_messages];

/// Fields of other servers, each with a value that would change the answer, and values that change nothing.
#[test]
fn fields_of_other_servers_are_refused_unless_their_value_is_neutral() {
    for (field, value, neutral) in [
        ("include_stop_str_in_output", json!(true), json!([false, null])),
        ("skip_special_tokens", json!(false), json!([true])),
        ("top_n_sigma", json!(1.5), json!([0, -1, -1.0])),
        ("dynatemp_range", json!(0.5), json!([0, 0.0])),
        ("repeat_last_n", json!(64), json!([-1])),
        ("samplers", json!(["top_k"]), json!([[], null])),
        ("thinking_budget", json!(100), json!([null])),
        ("n_probs", json!(3), json!([0])),
        ("t_max_predict_ms", json!(500), json!([0, -1])),
        ("options", json!({"num_ctx": 4096}), json!([{}, null])),
        ("echo", json!(true), json!([false])),
    ] {
        for check in APIS {
            let with = |value: &Value| json!({field: value});
            let error = check(with(&value).as_object().expect("an object")).expect_err(field);
            assert_eq!(error.field(), Some(field));
            for neutral in neutral.as_array().expect("a list") {
                check(with(neutral).as_object().expect("an object")).expect("it changes nothing");
            }
        }
    }
}

#[test]
fn completions_take_best_of_if_it_is_the_number_of_answers() {
    let accepts = |best_of: Value, choices: usize| {
        let body = json!({"best_of": best_of});
        let fields = body.as_object().expect("an object");
        check_completion(fields).is_ok() && check_best_of(fields, choices).is_ok()
    };
    assert!(
        accepts(json!(1), 1) && accepts(json!(2), 2) && accepts(json!(2.0), 2) && accepts(json!(null), 2)
    );
    assert!(!accepts(json!(1), 2) && !accepts(json!(2), 1) && !accepts(json!(true), 1));
    for check in [check_chat as Check, check_response, check_messages] {
        assert!(check(json!({"best_of": 2}).as_object().expect("an object")).is_err());
    }
}

#[test]
fn special_tokens_are_added_as_each_api_does() {
    let accepts = |check: Check, adds: bool| {
        check(json!({"add_special_tokens": adds}).as_object().expect("an object")).is_ok()
    };
    for check in [check_completion as Check, check_embedding] {
        assert!(accepts(check, true) && !accepts(check, false));
    }
    for check in [check_chat as Check, check_response, check_messages] {
        assert!(accepts(check, false) && !accepts(check, true));
    }
}

#[test]
fn hints_are_accepted() {
    for check in APIS {
        check(json!({"verbosity": "low", "max_tool_calls": 3}).as_object().expect("an object"))
            .expect("a hint");
    }
}

#[test]
fn fields_of_another_api_are_refused_with_what_to_use() {
    for (check, body, advice) in [
        (check_chat as Check, json!({"stop_sequences": ["x"]}), "use stop"),
        (check_chat, json!({"max_output_tokens": 2}), "use max_tokens"),
        (check_chat, json!({"reasoning": {"effort": "low"}}), "use reasoning_effort"),
        (check_chat, json!({"num_predict": 2}), "use max_tokens"),
        (check_completion, json!({"max_completion_tokens": 1}), "use max_tokens"),
        (check_completion, json!({"top_logprobs": 2}), "use logprobs"),
        (check_completion, json!({"system": "be brief"}), "begin the prompt"),
        (check_completion, json!({"reasoning_effort": "low"}), "use /v1/chat/completions"),
        (check_completion, json!({"chat_template_kwargs": {"a": 1}}), "use /v1/chat/completions"),
        (check_completion, json!({"format": "json"}), "response_format"),
        (check_response, json!({"system": "be brief"}), "use instructions"),
        (check_response, json!({"stop_sequences": ["x"]}), "use stop"),
        (check_response, json!({"format": "json"}), "use text.format"),
        (check_messages, json!({"format": "json"}), "use output_config.format"),
        (check_messages, json!({"instructions": "be brief"}), "use system"),
        (check_messages, json!({"max_output_tokens": 2}), "use max_tokens"),
    ] {
        let error = check(body.as_object().expect("an object")).expect_err("it would change the answer");
        assert!(error.to_string().contains(advice), "{body}: {error}");
    }
    assert!(check_completion(json!({"top_logprobs": 0}).as_object().expect("an object")).is_ok());
}

#[test]
fn each_api_says_how_it_is_asked_for_reasoning() {
    let apis = [
        (check_chat as Check, "chat_template_kwargs: {\"enable_thinking\": true} or false"),
        (check_response, "chat_template_kwargs: {\"enable_thinking\": true} or false"),
        (check_messages, "thinking: {\"type\": \"enabled\"} or {\"type\": \"disabled\"}"),
    ];
    for (check, advice) in apis {
        let body = json!({"enable_thinking": true});
        let error = check(body.as_object().expect("an object")).expect_err("it is not understood");
        assert_eq!(error.field(), Some("enable_thinking"));
        assert!(error.to_string().ends_with(advice), "{error}");
    }
    let body = json!({"thinking": {"type": "disabled"}});
    assert!(check_chat(body.as_object().expect("an object")).is_err());
    assert!(check_messages(body.as_object().expect("an object")).is_ok());
}
