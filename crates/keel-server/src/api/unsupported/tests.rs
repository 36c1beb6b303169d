use super::*;

/// The first field of a body that is refused everywhere.
fn refused(body: Value) -> Option<String> {
    let error = RERANK.check(body.as_object().expect("an object")).err()?;
    error.field().map(str::to_string)
}

#[test]
fn what_changes_the_answer_is_refused_and_what_does_not_is_not() {
    assert_eq!(refused(json!({"lora": "x"})).as_deref(), Some("lora"));
    assert_eq!(refused(json!({"suffix": "}"})).as_deref(), Some("suffix"));
    assert_eq!(refused(json!({"modalities": ["text", "audio"]})).as_deref(), Some("modalities"));
    assert_eq!(refused(json!({"best_of": 4, "user": "me"})).as_deref(), Some("best_of"));
    assert_eq!(refused(json!({"prompt_logprobs": 0})).as_deref(), Some("prompt_logprobs"));
    for field in ["repeat_penalty", "n_predict", "max_new_tokens"] {
        assert_eq!(refused(json!({field: 2})).as_deref(), Some(field));
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

const APIS: [Refused; 4] = [CHAT, COMPLETION, RESPONSE, MESSAGES];

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
        for api in APIS {
            let with = |value: &Value| json!({field: value});
            let error = api.check(with(&value).as_object().expect("an object")).expect_err(field);
            assert_eq!(error.field(), Some(field));
            for neutral in neutral.as_array().expect("a list") {
                api.check(with(neutral).as_object().expect("an object")).expect("it changes nothing");
            }
        }
    }
}

#[test]
fn completions_take_best_of_if_it_is_the_number_of_answers() {
    let accepts = |best_of: Value, choices: usize| {
        let body = json!({"best_of": best_of});
        let fields = body.as_object().expect("an object");
        COMPLETION.check(fields).is_ok() && check_best_of(fields, choices).is_ok()
    };
    assert!(
        accepts(json!(1), 1) && accepts(json!(2), 2) && accepts(json!(2.0), 2) && accepts(json!(null), 2)
    );
    assert!(!accepts(json!(1), 2) && !accepts(json!(2), 1) && !accepts(json!(true), 1));
    for api in [CHAT, RESPONSE, MESSAGES] {
        assert!(api.check(json!({"best_of": 2}).as_object().expect("an object")).is_err());
    }
}

#[test]
fn special_tokens_are_added_as_each_api_does() {
    let accepts = |api: &Refused, adds: bool| {
        api.check(json!({"add_special_tokens": adds}).as_object().expect("an object")).is_ok()
    };
    for api in [COMPLETION, EMBEDDING] {
        assert!(accepts(&api, true) && !accepts(&api, false));
    }
    for api in [CHAT, RESPONSE, MESSAGES] {
        assert!(accepts(&api, false) && !accepts(&api, true));
    }
}

#[test]
fn hints_are_accepted() {
    for api in APIS {
        let body = json!({"verbosity": "low", "max_tool_calls": 3});
        api.check(body.as_object().expect("an object")).expect("a hint");
    }
}

#[test]
fn fields_of_another_api_are_refused_with_what_to_use() {
    for (api, body, advice) in [
        (CHAT, json!({"stop_sequences": ["x"]}), "use stop"),
        (CHAT, json!({"max_output_tokens": 2}), "use max_tokens"),
        (CHAT, json!({"reasoning": {"effort": "low"}}), "use reasoning_effort"),
        (CHAT, json!({"num_predict": 2}), "use max_tokens"),
        (COMPLETION, json!({"max_completion_tokens": 1}), "use max_tokens"),
        (COMPLETION, json!({"top_logprobs": 2}), "use logprobs"),
        (COMPLETION, json!({"system": "be brief"}), "begin the prompt"),
        (COMPLETION, json!({"reasoning_effort": "low"}), "use /v1/chat/completions"),
        (COMPLETION, json!({"chat_template_kwargs": {"a": 1}}), "use /v1/chat/completions"),
        (COMPLETION, json!({"format": "json"}), "response_format"),
        (RESPONSE, json!({"system": "be brief"}), "use instructions"),
        (RESPONSE, json!({"stop_sequences": ["x"]}), "use stop"),
        (RESPONSE, json!({"format": "json"}), "use text.format"),
        (MESSAGES, json!({"format": "json"}), "use output_config.format"),
        (MESSAGES, json!({"instructions": "be brief"}), "use system"),
        (MESSAGES, json!({"max_output_tokens": 2}), "use max_tokens"),
    ] {
        let error = api.check(body.as_object().expect("an object")).expect_err("it would change the answer");
        assert!(error.to_string().contains(advice), "{body}: {error}");
    }
    assert!(COMPLETION.check(json!({"top_logprobs": 0}).as_object().expect("an object")).is_ok());
}

#[test]
fn each_api_says_how_it_is_asked_for_reasoning() {
    let apis = [
        (CHAT, "chat_template_kwargs: {\"enable_thinking\": true} or false"),
        (RESPONSE, "chat_template_kwargs: {\"enable_thinking\": true} or false"),
        (MESSAGES, "thinking: {\"type\": \"enabled\"} or {\"type\": \"disabled\"}"),
    ];
    for (api, advice) in apis {
        let body = json!({"enable_thinking": true});
        let error = api.check(body.as_object().expect("an object")).expect_err("it is not understood");
        assert_eq!(error.field(), Some("enable_thinking"));
        assert!(error.to_string().ends_with(advice), "{error}");
    }
    let body = json!({"thinking": {"type": "disabled"}});
    assert!(CHAT.check(body.as_object().expect("an object")).is_err());
    assert!(MESSAGES.check(body.as_object().expect("an object")).is_ok());
}
