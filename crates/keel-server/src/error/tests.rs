use super::*;

#[test]
fn what_the_client_can_mend_is_4xx_and_names_no_file() {
    let context = ServerError::from(EngineError::Context { needed: 9000, context: 4096 });
    assert_eq!((context.reply().status.as_u16(), context.reply().code), (400, "context_length_exceeded"));
    assert!(context.public_message().contains("9000"));
    let full = ServerError::from(EngineError::QueueFull { waiting: 3, arriving: 1, limit: 3 });
    assert_eq!((full.reply().status.as_u16(), full.reply().retry_after), (429, Some(1)));
    let ours = ServerError::from(std::io::Error::other("/secret/path"));
    assert_eq!(ours.reply().status.as_u16(), 500);
    assert!(!ours.public_message().contains("secret"));
}

/// The model is loaded again, or a supervisor starts the server again.
#[test]
fn a_stopped_engine_may_be_asked_again() {
    for error in [ServerError::EngineStopped, ServerError::EngineLost { source: None }] {
        let reply = error.reply();
        assert_eq!((reply.status.as_u16(), reply.code, reply.retry_after), (503, "engine_stopped", Some(10)));
        assert!(!error.public_message().contains("restart"), "{error}");
    }
}

/// Clients shorten a conversation by themselves if the message has these words.
#[test]
fn clients_recognise_a_full_context() {
    let (context, context_max) = (4096, 8192);
    let errors = [
        (ServerError::PromptTooLong { prompt: 18011, context, context_max }, "18011"),
        (
            ServerError::TextTooLong {
                bytes: 90_000,
                bytes_most: 20_000,
                tokens: 18011,
                context,
                context_max,
            },
            "at least 18011",
        ),
        (EngineError::Context { needed: 18011, context }.into(), "18011"),
    ];
    for (error, tokens) in errors {
        assert_eq!(error.reply().code, "context_length_exceeded");
        let message = error.public_message();
        let begin = "This model's maximum context length is 4096 tokens here";
        assert!(message.starts_with(begin) && message.contains(tokens), "{message}");
        let message = error.public_message_for_anthropic();
        let begin = format!("prompt is too long: {tokens} tokens > 4096 maximum; ");
        assert!(message.starts_with(&begin) && message.contains("--context"), "{message}");
    }
    let full = ServerError::PromptTooLong { prompt: 4096, context, context_max };
    let message = full.public_message_for_anthropic();
    assert!(message.contains("4096 tokens > 4095 maximum"), "{message}");
    let other = ServerError::Unauthorized;
    assert_eq!(other.public_message_for_anthropic(), other.public_message());
}
