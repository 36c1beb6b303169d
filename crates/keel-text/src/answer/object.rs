//! Calls that are JSON objects.

use serde_json::{Map, Value};

use super::reader::{Read, Reader, Stop, find, fits, names};

/// The keys of a call, with the quotes after them.
const KEYS: [&str; 5] = ["name\"", "type\"", "parameters\"", "arguments\"", "id\""];

/// The members of an object that may be a call.
#[derive(Default)]
struct Members {
    name: Option<String>,
    arguments: Option<Value>,
    parameters: Option<Value>,
    /// The first keys are those of a call, or of something else. An id and a type may be of both.
    is_decided: bool,
    /// There are keys that no call has.
    has_others: bool,
}

impl Reader<'_> {
    /// Reads an object. Its first key decides whether it may be a call, and for some keys the value. After an id or a
    /// type the next key decides. After a begin marker any key may come first.
    pub(super) fn object(&mut self) -> Read<()> {
        let mut members = Members::default();
        let result = self.members(&mut members);
        // Many values of JSON begin with the key `id`, as some calls do.
        let is_value = members.name.is_none() && members.is_decided;
        result.map_err(|stop| if is_value { stop.if_open(Stop::Unnamed) } else { stop })?;
        let (name, arguments) = self.call_of(members).ok_or(Stop::Wrong)?;
        self.push(&name, arguments);
        Ok(())
    }

    fn members(&mut self, members: &mut Members) -> Read<()> {
        self.expect("{")?;
        loop {
            let Some(key) = self.next().strip_prefix('"') else { return Err(self.stop()) };
            let may_be_value = self.markers.is_none() && !members.is_decided;
            if !KEYS.iter().any(|word| fits(key, word)) {
                if may_be_value {
                    return Err(Stop::Wrong);
                }
                (members.is_decided, members.has_others) = (true, true);
            }
            let key: String = self.json()?;
            self.expect(":")?;
            let value = self.next();
            let allowed: Vec<String> = match &key[..] {
                "name" => names(self.tools).map(|name| Value::from(name).to_string()).collect(),
                "type" if may_be_value => vec!["\"function".into(), "\"tool".into()],
                "id" if may_be_value => vec!["\"".into()],
                _ => vec![String::new()],
            };
            if !allowed.iter().any(|word| may_be(value, word)) {
                return Err(Stop::Wrong);
            }
            // The value decides while it may be one of these words.
            let is_begun = allowed.iter().any(|word| word.len() > value.len());
            let unnamed = if members.name.is_none() && !is_begun { Stop::Unnamed } else { Stop::Open };
            let value: Value = self.json().map_err(|stop| stop.if_open(unnamed))?;
            members.is_decided |= ["name", "arguments", "parameters"].contains(&&key[..]);
            match &key[..] {
                "name" => members.name = value.as_str().map(String::from),
                "arguments" => members.arguments = Some(value),
                "parameters" => members.parameters = Some(value),
                _ => {}
            }
            if !self.take(",")? {
                return self.expect("}");
            }
        }
    }

    /// The call that an object is. A description of a tool is none.
    fn call_of(&self, members: Members) -> Option<(String, Map<String, Value>)> {
        let name = members.name?;
        let tool = find(self.tools, &name)?;
        let is_call = members.arguments.is_some();
        let is_schema = members
            .parameters
            .as_ref()
            .is_some_and(|schema| schema["type"] == "object" && schema["properties"].is_object());
        let takes_schema = !tool["parameters"]["properties"]["properties"].is_null();
        let is_other = is_schema && !takes_schema || members.has_others && self.markers.is_none();
        if is_other && !is_call {
            return None;
        }
        let arguments = match members.arguments.or(members.parameters) {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(arguments)) => arguments,
            Some(Value::String(text)) if text.trim().is_empty() => Map::new(),
            Some(Value::String(text)) => serde_json::from_str(&text).ok()?,
            Some(_) => return None,
        };
        Some((name, arguments))
    }
}

/// The same as [`fits`], if no escape comes before the first difference. What comes after it is not compared.
fn may_be(value: &str, word: &str) -> bool {
    let same = value.bytes().zip(word.bytes()).take_while(|(a, b)| a == b).count();
    same == word.len() || value.as_bytes().get(same).is_none_or(|&byte| byte == b'\\')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::answer::AnswerForm;
    use crate::answer::tests::{call, check, text, tools};

    /// JSON that the user asked for may name a tool, describe it, or mention a call in a string.
    #[test]
    fn json_that_is_no_call_is_text() {
        let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
        let marked = AnswerForm { marked_calls: true, ..form.clone() };
        let schema = r#"{"type": "object", "properties": {"city": {"type": "string"}}}"#;
        let description = format!(r#"{{"name": "weather", "parameters": {schema}}}"#);
        for answer in [
            description.clone(),
            format!("[{description}, {description}]"),
            format!(r#"{{"name": "weather", "description": "of a city", "parameters": {schema}}}"#),
            r#"{"name": "weather", "description": "of a city"}"#.into(),
            r#"{"name": "weather", "parameters": {"city": "Bern"}, "result": "rain"}"#.into(),
            r#"{"type": "function", "name": "weather", "strict": true}"#.into(),
            r#"{"use": "<tool_call>weather</tool_call>"}"#.into(),
            r#"{"name": "weather", "use": "<tool_call>weather</tool_call>"}"#.into(),
        ] {
            check(&form, &answer, &[text(&answer)]);
            check(&marked, &answer, &[text(&answer)]);
            check(&form, &format!("{answer}\n<tool_call>weather</tool_call>"), &[text(&answer), call("{}")]);
        }
        check(
            &form,
            &format!("<tool_call>{description}</tool_call>"),
            &[text(&format!("<tool_call>{description}</tool_call>"))],
        );
        for answer in [r#"["<tool_call>weather</tool_call>"]"#, r#""<tool_call>weather</tool_call>""#] {
            check(&marked, answer, &[text(answer)]);
        }
        // A tool may take a schema.
        let tool = json!({"name": "weather", "parameters": {"properties": {"type": {}, "properties": {}}}});
        let form = AnswerForm { tools: vec![tool], ..AnswerForm::default() };
        let arguments = r#"{"type":"object","properties":{}}"#;
        check(
            &form,
            &format!(r#"{{"name": "weather", "parameters": {arguments}}}"#),
            &[call(r#"{"type":"object","properties":{}}"#)],
        );
    }
}
